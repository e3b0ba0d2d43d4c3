"""The progress engine of `smddp`: operations go on while their ranks do something else than wait for them."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from smp_core.transport.smddp import futex, progress
from smp_core.transport.smddp.point_to_point import EAGER_BYTES
from tests.smp_core.transport.smddp.rank_processes import (
    KILLED,
    MANY,
    RANKS,
    WIDE,
    limit,
    on_ranks,
    progress_threads,
    text_of,
)


def test_a_wait_that_is_woken_for_other_things_finds_who_has_ended(tmp_path: Path) -> None:
    def body(rank: int) -> str:
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        sleep = futex.sleep

        def woken(words: Any, seconds: float) -> bool:
            sleep(words, min(seconds, 0.001))
            return True

        futex.sleep = woken
        return text_of(dist.DistBackendError, lambda: dist.recv(torch.empty(1), 1))

    one, killed = on_ranks(tmp_path, 2, body)
    assert killed == KILLED
    assert "rank 1: its process" in one


def test_an_operation_is_done_though_nobody_waits_for_it(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        tensors = [torch.full((MANY,), float(rank + number)) for number in range(3)]
        done = [threading.Event() for _ in tensors]
        for tensor, event in zip(tensors, done, strict=True):
            future = dist.all_reduce(tensor, async_op=True).get_future()
            future.add_done_callback(lambda _, event=event: event.set())
        for number, (tensor, event) in enumerate(zip(tensors, done, strict=True)):
            assert event.wait(limit())
            assert torch.equal(tensor, torch.full((MANY,), 3.0 + 3 * number))

    on_ranks(tmp_path, RANKS, body)


def test_a_message_arrives_though_its_ranks_wait_elsewhere(tmp_path: Path) -> None:
    """They wait in a barrier of Gloo before they wait for the message."""

    def body(rank: int) -> None:
        elsewhere = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=limit()))
        for count in (1, EAGER_BYTES, MANY):
            tensor = torch.full((count,), float(rank))
            if rank == 0:
                dist.send(tensor, 1)  # done when rank 1 has taken it
            work = dist.irecv(tensor, 0) if rank == 1 else None
            dist.barrier(elsewhere)
            if work is not None:
                work.wait()
                assert torch.equal(tensor, torch.zeros(count))

    on_ranks(tmp_path, 2, body)


def test_the_first_bucket_of_a_gradient_is_reduced_before_the_last_is_computed(
    tmp_path: Path,
) -> None:
    """The backward of the first layer, which comes last, waits for the reduction of the last layer's gradient. Rank 0
    begins that when the others have issued it and gone on.
    """

    def body(rank: int) -> None:
        first, last = (torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(2))
        reduced = threading.Event()
        store = dist.FileStore(str(tmp_path / "elsewhere"), RANKS)  # type: ignore[attr-defined]
        store.set_timeout(datetime.timedelta(seconds=limit()))

        class Waits(torch.autograd.Function):
            @staticmethod
            def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(context: Any, gradient: torch.Tensor) -> Any:
                assert reduced.wait(limit())
                return gradient

        class Model(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = first, last

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return last(Waits.apply(first(x)))

        def hook(_: object, bucket: Any) -> Any:
            if rank == 0 and not bucket.is_last():
                store.wait([f"gone on {each}" for each in range(1, RANKS)])
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()

            def value(each: Any) -> torch.Tensor:
                reduced.set()
                return each.value()[0] / RANKS

            if not bucket.is_last():
                store.set(f"gone on {rank}", "")
            return future.then(value)

        hook.__annotations__.clear()  # torch compares them with types, and these are texts
        for layer in (first, last):
            torch.nn.init.constant_(layer.weight, 0.5)
        model = DistributedDataParallel(Model(), bucket_cap_mb=0.01)
        model.register_comm_hook(None, hook)
        x = torch.full((1, WIDE), float(rank + 1))
        reduced.set()
        model(x).sum().backward()  # in the first step DDP has one bucket
        model.zero_grad()
        reduced.clear()
        model(x).sum().backward()
        # The mean of the inputs 1, 2, 3 is 2; all numbers are exact.
        assert torch.equal(first.weight.grad, torch.full((WIDE, WIDE), 2 * 0.5 * WIDE))
        assert torch.equal(last.weight.grad, torch.full((WIDE, WIDE), 2 * 0.5 * WIDE))

    on_ranks(tmp_path, RANKS, body)


def test_a_callback_issues_an_operation(tmp_path: Path) -> None:
    def body(rank: int) -> None:
        tensor, other, done = torch.ones(MANY), torch.ones(MANY), threading.Event()

        def again(_: object) -> None:
            future = dist.all_reduce(other, async_op=True).get_future()
            future.add_done_callback(lambda _: done.set())

        dist.all_reduce(tensor, async_op=True).get_future().add_done_callback(again)
        assert done.wait(limit())
        assert torch.equal(other, torch.full((MANY,), float(RANKS)))

    on_ranks(tmp_path, RANKS, body)


def test_there_is_one_progress_thread_from_the_first_group_to_the_last(tmp_path: Path) -> None:
    def body(rank: int) -> list[int]:
        seen = [progress_threads()]
        group = dist.new_group([0, 1])
        seen.append(progress_threads())
        dist.destroy_process_group(group)
        seen.append(progress_threads())
        dist.destroy_process_group()
        return [*seen, progress_threads()]

    assert on_ranks(tmp_path, 2, body) == [[1, 1, 1, 0]] * 2


def test_an_operation_goes_on_beside_a_thread_that_waits_for_another(tmp_path: Path) -> None:
    """The thread that waits knows nothing of the operation's group, and does not poll by itself."""

    def body(rank: int) -> None:
        groups = [dist.new_group() for _ in range(3)]
        for group in groups:
            dist.barrier(group)
        progress._POLL_INTERVAL = 3600.0
        message, slept = torch.zeros(1), threading.Event()
        sleep = futex.sleep

        def noted(words: Any, seconds: float) -> bool:
            if threading.current_thread() is waiter:
                slept.set()
            return sleep(words, seconds)

        futex.sleep = noted
        waiter = threading.Thread(target=dist.recv, args=(message, 1 - rank))
        waiter.start()
        assert slept.wait(limit())
        for group in groups:
            done, tensor = threading.Event(), torch.ones(MANY)
            future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
            future.add_done_callback(lambda _, done=done: done.set())
            assert done.wait(limit())
            assert torch.equal(tensor, torch.full((MANY,), 2.0))
        dist.send(torch.ones(1), 1 - rank)
        waiter.join()
        assert message.item() == 1

    on_ranks(tmp_path, 2, body)


def test_a_signal_s_handler_takes_the_lock_that_its_thread_waits_for(tmp_path: Path) -> None:
    waits = threading.Semaphore(0)

    class Lock:
        """Notices every wait for it."""

        def __init__(self) -> None:
            self._lock = threading.RLock()

        def acquire(self, blocking: bool = True) -> bool:
            if blocking:
                waits.release()
            return self._lock.acquire(blocking)

        def release(self) -> None:
            self._lock.release()

    def body(rank: int) -> list[str]:
        lock: Any = progress._PriorityLock()
        lock._lock = Lock()
        main, done = threading.get_ident(), []
        taken, struck = threading.Event(), threading.Event()

        def handler(*_: Any) -> None:
            if not struck.is_set():
                struck.set()
                with lock:
                    done.append("handler")

        def other() -> None:
            with lock:
                taken.set()
                assert waits.acquire(timeout=limit())  # the main thread's
                while not struck.wait(
                    0.01
                ):  # one that comes just before the thread sleeps does not wake it
                    signal.pthread_kill(main, signal.SIGUSR1)
                assert waits.acquire(timeout=limit())  # the handler's

        signal.signal(signal.SIGUSR1, handler)
        thread = threading.Thread(target=other)
        thread.start()
        assert taken.wait(limit())
        with lock:
            done.append("main")
        thread.join()
        return done

    assert on_ranks(tmp_path, 1, body) == [["handler", "main"]]


def test_a_group_that_goes_settles_what_its_last_step_has_done() -> None:
    class Channel:
        def progress(self, steps: int = progress.ALL) -> list[Any]:
            promise.done = True
            return []

        def check(self) -> None:
            pass

    class Promised:
        end, done, settled = float("inf"), False, False

        def ready(self) -> bool:
            return self.done

        def settle(self) -> None:
            self.settled = True

        def expire(self) -> None:
            pass

    loop, promise = progress.ProgressLoop(), Promised()
    loop._groups = {"a", "b"}
    loop._busy[Channel()] = None
    loop._promises[promise] = None
    loop.leave("a")
    assert promise.settled


def test_a_rank_that_waits_for_a_call_advances_all_that_is_in_flight(tmp_path: Path) -> None:
    """Rank 0 begins its part of an operation when rank 1 sleeps in a call of another group."""
    slept = multiprocessing.get_context("fork").Event()

    def body(rank: int) -> None:
        groups = [dist.new_group() for _ in range(2)]
        for group in groups:
            dist.barrier(group)
        progress._POLL_INTERVAL = 3600.0
        tensor = torch.ones(MANY)
        if rank == 0:
            assert slept.wait(limit())
            dist.all_reduce(tensor, group=groups[0])
            dist.barrier(groups[1])
        else:
            sleep, main = futex.sleep, threading.current_thread()

            def noted(words: Any, seconds: float) -> bool:
                if threading.current_thread() is main:
                    slept.set()
                return sleep(words, seconds)

            futex.sleep = noted
            work = dist.all_reduce(tensor, group=groups[0], async_op=True)
            dist.barrier(groups[1])
            assert work is not None
            work.wait()
        assert torch.equal(tensor, torch.full((MANY,), 2.0))

    on_ranks(tmp_path, 2, body)


#: A rank that ends in the middle of its operations.
SCRIPT = """
import datetime, sys
import torch
import smp_core.transport.smddp
from torch import distributed as dist

_, store, rank = sys.argv
limit = datetime.timedelta(seconds=60)
dist.init_process_group("smddp", store=dist.FileStore(store, 2), rank=int(rank), world_size=2, timeout=limit)
works = [dist.all_reduce(torch.ones(10_000_000), async_op=True) for _ in range(3)]
"""


def ended(tmp_path: Path, text: str) -> list[tuple[str, int]]:
    """The output and the exit code of a script, of each of two ranks."""
    script = tmp_path / "script.py"
    script.write_text(text)
    started = [
        subprocess.Popen(
            [sys.executable, script, tmp_path / "store", str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    return [(each.communicate(timeout=120)[0], each.returncode) for each in started]


def test_a_process_ends_in_the_middle_of_its_operations(tmp_path: Path) -> None:
    assert ended(tmp_path, SCRIPT) == [("", 0)] * 2


#: Rank 0 ends by an error while the callback of a future waits for rank 1, which waits for the end of rank 0.
WAITING = """
import datetime, sys, threading
import torch
import smp_core.transport.smddp
from torch import distributed as dist

_, store, rank = sys.argv
limit = datetime.timedelta(seconds=60)
dist.init_process_group("smddp", store=dist.FileStore(store, 2), rank=int(rank), world_size=2, timeout=limit)
other, called = dist.new_group(), threading.Event()
elsewhere = dist.FileStore(store + " elsewhere", 2)
dist.barrier()

def callback(_):
    called.set()
    dist.barrier(other)

work = dist.all_reduce(torch.ones(1), async_op=True) if rank == "0" else None
if work:
    work.get_future().then(callback)
    elsewhere.set("go", "")
    called.wait()
    sys.exit(3)
elsewhere.wait(["go"])
dist.all_reduce(torch.ones(1))
try:
    dist.barrier()
except dist.DistBackendError as error:
    print(error)
"""


def test_a_process_ends_though_a_callback_waits_for_another_rank(tmp_path: Path) -> None:
    (_, code), (text, other) = ended(tmp_path, WAITING)
    assert (code, other) == (3, 0)
    assert "call 3 on group WORLD cannot end: rank 0: its process" in text


def test_a_waiting_thread_advances_what_the_progress_thread_leaves(tmp_path: Path) -> None:
    """Sixteen operations in flight from four threads, each waited for by its own: all are done, with their values."""

    def body(rank: int) -> None:
        groups = [dist.new_group() for _ in range(4)]
        wrong: list[Any] = []

        def use(group: Any, number: int) -> None:
            works = []
            for each in range(4):
                tensor = torch.full((MANY // 8,), float(number + each + rank))
                works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor, each))
            for work, tensor, each in reversed(works):
                work.wait()
                if not torch.equal(tensor, torch.full_like(tensor, 3.0 * (number + each) + 3)):
                    wrong.append((number, each))

        threads = [
            threading.Thread(target=use, args=(group, number))
            for number, group in enumerate(groups)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    on_ranks(tmp_path, RANKS, body)
