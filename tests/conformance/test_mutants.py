"""Every requirement is proved: it passes on the reference, and fails on a bug planted for it.

A mutant is a function that plants one bug into the reference implementation. It stands in MUTANTS
beside the requirement that must fail because of it.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import Phase, settings

import conformance
import smp_core.torch as smp
from conformance.requirements import REQUIREMENTS
from pytest_smp.proxies import SmpWorld, TmpPath
from smp_core import comm, config, runtime, topology
from smp_core.backends.base import Group
from smp_core.backends.fabrics.sim import objects
from smp_core.backends.fabrics.sim.objects import SimObjects
from smp_core.backends.hosts import current
from smp_core.backends.payload import Payload
from smp_core.errors import (
    AlreadyInitializedError,
    ConfigError,
    PayloadError,
    RankError,
    VerdictError,
)

Patch = pytest.MonkeyPatch

# ---- Running properties --------------------------------------------------------------------------

#: The first failure is enough: it is not made smaller, not kept, and the same in every run.
ONCE = settings(
    deadline=None, max_examples=60, derandomize=True, database=None, phases=[Phase.generate]
)


class Property(NamedTuple):
    """A test function of the suite with one set of parameters."""

    name: str
    test: Callable[..., None]
    parameters: dict[str, Any]

    def run(self, smp_world: SmpWorld, smp_tmp_path: TmpPath) -> None:
        """Run it; it raises if it fails."""
        arguments = {"smp_world": smp_world, "smp_tmp_path": smp_tmp_path}
        code = getattr(self.test, "hypothesis", None)
        function = self.test if code is None else code.inner_test
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        with pytest.MonkeyPatch.context() as patch:
            if code is not None:
                patch.setattr(self.test, "_hypothesis_internal_use_settings", ONCE)
            self.test(
                **{name: value for name, value in arguments.items() if name in names},
                **self.parameters,
            )


def collect() -> Iterator[tuple[str, Property]]:
    """Every property with the id of its requirement, as pytest would collect it."""
    for module in pkgutil.iter_modules(conformance.__path__):
        if not module.name.startswith("test_"):
            continue
        tests = vars(importlib.import_module(f"conformance.{module.name}")).items()
        for name, test in tests:
            if not name.startswith("test_"):
                continue
            marks = {mark.name: mark for mark in test.pytestmark}
            for values, own in parameters(marks.get("parametrize")):
                mark = own.get("requirement") or marks["requirement"]
                yield mark.args[0], Property(name, test, values)


def parameters(mark: pytest.Mark | None) -> Iterator[tuple[dict[str, Any], dict[str, pytest.Mark]]]:
    """Sets of parameters, each with its own marks; one empty set without ``parametrize``."""
    if mark is None:
        yield {}, {}
        return
    names, sets = mark.args
    if isinstance(names, str):
        names, sets = [names], [(each,) for each in sets]
    for each in sets:
        values, marks = (each.values, each.marks) if hasattr(each, "marks") else (each, ())
        yield dict(zip(names, values, strict=True)), {own.name: own.mark for own in marks}


@functools.cache
def properties() -> dict[str, list[Property]]:
    """The properties of each requirement."""
    found = defaultdict(list)
    for id, each in collect():
        found[id].append(each)
    return dict(found)


@pytest.fixture(autouse=True)
def _no_memory() -> Iterator[None]:
    """Configurations and layouts are remembered; a mutant must not see, or leave, those of another."""
    memories = (runtime._parse_cached, runtime._topology, topology._lay_out)
    for memory in memories:
        memory.cache_clear()
    yield
    for memory in memories:
        memory.cache_clear()


# ---- Building blocks of bugs ---------------------------------------------------------------------


class PerRun:
    """State that starts afresh with every run."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make, self._job, self._state = make, None, None

    def __call__(self) -> Any:
        context = current.current()
        assert context is not None
        if self._job is not context.job:
            self._job, self._state = context.job, self._make()
        return self._state


def wrap(patch: Patch, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``smp.name`` by a function that gets the original first."""
    patch.setattr(smp, name, functools.partial(wrapper, getattr(smp, name)))


def mailbox(
    patch: Patch,
    take: int = 0,
    any_source: bool = False,
    broadcast_first: bool = False,
    wait_for_first: bool = False,
) -> None:
    """An object transport that waits for no receiver.

    Args:
        take: which of the waiting objects is received: the oldest (0) or the newest (-1).
        any_source: receive from whoever has sent.
        broadcast_first: broadcasts overtake sends.
        wait_for_first: broadcast waits until the first receiver has taken the object.
    """
    boxes = PerRun(lambda: defaultdict(list))

    def box(src: int, dest: int) -> list[Payload]:
        found: list[Payload] = boxes()[None if any_source else src, dest]
        return found

    def send(self: SimObjects, obj: object, dest: int) -> None:
        box(self._context.rank, dest).append(Payload(obj, "smp.send"))

    def broadcast(self: SimObjects, obj: object, group: Group) -> None:
        me, others = self._context.rank, [r for r in group.ranks if r != self._context.rank]
        for dest in others:
            waiting = box(me, dest)
            waiting.insert(0 if broadcast_first else len(waiting), Payload(obj, "smp.broadcast"))
        while wait_for_first and others and box(me, others[0]):
            self._context.scheduler.give_way(self._context.seat)

    def recv_from(self: SimObjects, src: int) -> Any:
        while not box(src, self._context.rank):
            self._context.scheduler.give_way(self._context.seat)
        return box(src, self._context.rank).pop(take).thaw()

    for call in (send, broadcast, recv_from):
        patch.setattr(SimObjects, call.__name__, call)


def without_rule(*keys: str) -> Callable[[Patch], None]:
    """Forget the rule between these keys of the configuration."""

    def plant(patch: Patch) -> None:
        left = tuple(rule for rule in config.RULES if rule.keys != keys)
        assert len(left) == len(config.RULES) - 1
        patch.setattr(config, "RULES", left)

    return plant


def parse_without(patch: Patch, forget: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Change a script's parameters before they are judged."""
    parse = runtime._parse
    patch.setattr(
        runtime,
        "_parse",
        lambda given, launcher: parse(None if given is None else forget(dict(given)), launcher),
    )


def members(group: smp.CommGroup) -> tuple[int, ...]:
    """The caller's group."""
    return comm.current("the mutant").group(group.value).ranks


# ---- The bugs ------------------------------------------------------------------------------------


class Mutant(NamedTuple):
    """A planted bug, the requirement that must fail, and how."""

    requirement: str
    plant: Callable[[Patch], None]
    by: tuple[type[BaseException], ...]

    @property
    def sentence(self) -> str:
        """The bug in words."""
        return str(self.plant.__doc__).partition("\n")[0]


MUTANTS: list[Mutant] = []

#: How a wrong value shows: an assertion of the property, or pytest.raises that saw nothing raised.
ASSERTION = (AssertionError, pytest.fail.Exception)


def kills(
    requirement: str, *by: type[BaseException]
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Enter a bug into MUTANTS: ``requirement`` must fail, by an assertion or what ``by`` names."""

    def enter(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        MUTANTS.append(Mutant(requirement, plant, by or ASSERTION))
        return plant

    return enter


@kills("LIFE-INITIALIZED")
def always_initialized(patch: Patch) -> None:
    """is_initialized is True before init"""
    patch.setattr(smp, "is_initialized", lambda: True)


@kills("LIFE-INITIALIZED")
def never_initialized(patch: Patch) -> None:
    """is_initialized is False after init"""
    patch.setattr(smp, "is_initialized", lambda: False)


@kills("LIFE-INIT-BARE", TypeError)
def init_demands_parameters(patch: Patch) -> None:
    """init has no default for its argument"""
    init = smp.init
    patch.setattr(smp, "init", lambda config: init(config))


@kills("LIFE-INIT-BARE", *ASSERTION, ConfigError)
def default_pipeline(patch: Patch) -> None:
    """two partitions by default (SMP_API.md 8.4)"""
    wrap(patch, "init", lambda init, given=None: init({"partitions": 2, **(given or {})}))


@kills("LIFE-INIT-PARAMETERS")
def init_forgets_parameters(patch: Patch) -> None:
    """init ignores the dict"""
    wrap(patch, "init", lambda init, given=None: init())


@kills("LIFE-INIT-PARAMETERS")
def init_forgets_placement(patch: Patch) -> None:
    """init ignores placement_strategy"""
    parse_without(patch, lambda given: {**given, "placement_strategy": "cluster"})


@kills("LIFE-FIRST-CALL")
def calls_initialize(patch: Patch) -> None:
    """a call before init initialises with defaults"""

    def rank(original: Callable[[], int]) -> int:
        smp.init()
        return original()

    wrap(patch, "rank", rank)


@kills("LIFE-INIT-AGAIN", AlreadyInitializedError)
def init_only_once(patch: Patch) -> None:
    """any second init is refused"""

    def init(original: Callable[[Any], None], given: Any = None) -> None:
        if smp.is_initialized():
            raise AlreadyInitializedError("smp.init: only once")
        original(given)

    wrap(patch, "init", init)


@kills("LIFE-INIT-AGAIN")
def init_resets(patch: Patch) -> None:
    """a second init without parameters goes back to the defaults"""

    def init(original: Callable[[Any], None], given: Any = None) -> None:
        if given is None:
            smp.shutdown()
        original(given)

    wrap(patch, "init", init)


@kills("LIFE-INIT-OTHER")
def last_init_wins(patch: Patch) -> None:
    """a second init replaces the first"""

    def init(original: Callable[[Any], None], given: Any = None) -> None:
        smp.shutdown()
        original(given)

    wrap(patch, "init", init)


@kills("LIFE-INIT-OTHER")
def first_init_wins(patch: Patch) -> None:
    """a second init is ignored, whatever it says"""
    wrap(patch, "init", lambda init, given=None: None if smp.is_initialized() else init(given))


@kills("CONF-VALID")
def sharding_below_data_parallel(patch: Patch) -> None:
    """the sharded degree must be less than the degree of data parallelism (SMP_API.md 8.1)"""
    check = config.Config.check_world

    def check_world(self: config.Config, size: int) -> None:
        check(self, size)
        if 1 < self.sharded_data_parallel_degree == size // self.tensor_parallel_degree:
            raise ConfigError("sharded_data_parallel_degree is too large")

    patch.setattr(config.Config, "check_world", check_world)


@kills("CONF-VALID")
def no_permutations(patch: Patch) -> None:
    """placements are cluster and spread only, as in the client-side check (SMP_API.md 8.6)"""
    parse = runtime._parse

    def parse_strictly(given: Any, launcher: str) -> config.Config:
        parsed = parse(given, launcher)
        if parsed.placement_strategy not in ("cluster", "spread"):
            raise ConfigError("placement_strategy")
        return parsed

    patch.setattr(runtime, "_parse", parse_strictly)


@kills("CONF-PARTITIONS", *ASSERTION, ConfigError)
def no_alias(patch: Patch) -> None:
    """partitions is an unknown key"""
    patch.setattr(config, "ALIASES", {})


@kills("CONF-PARTITIONS")
def alias_loses(patch: Patch) -> None:
    """of two unequal names of the pipeline degree one wins"""

    def forget(given: dict[str, Any]) -> dict[str, Any]:
        if "pipeline_parallel_degree" in given:
            given.pop("partitions", None)
        return {**given, "pipeline_parallel_degree": 1} if "partitions" not in given else given

    parse_without(patch, forget)


@kills("CONF-UNKNOWN-KEY")
def unknown_keys_pass(patch: Patch) -> None:
    """unknown keys are dropped, as in the client-side check (SMP_API.md 3.4)"""
    known = {*config.Config.model_fields, *config.ALIASES, *config.IGNORED_KEYS}
    parse_without(patch, lambda given: {key: v for key, v in given.items() if key in known})


@kills("CONF-VALUE")
def degrees_are_clamped(patch: Patch) -> None:
    """a number below 1 counts as 1"""
    parse_without(
        patch,
        lambda given: {
            key: max(1, value) if type(value) is int and key != "default_partition" else value
            for key, value in given.items()
        },
    )


@kills("CONF-VALUE")
def placements_in_lower_case(patch: Patch) -> None:
    """placements are accepted in lower case"""

    def forget(given: dict[str, Any]) -> dict[str, Any]:
        if given.get("placement_strategy") == "dpt":
            given["placement_strategy"] = "DPT"
        return given

    parse_without(patch, forget)


def no_topology_check(patch: Patch) -> None:
    """the second line of defence is gone"""
    patch.setattr(topology.Topology, "__post_init__", lambda self: None)


@kills("CONF-WORLD-SIZE")
def ranks_left_over(patch: Patch) -> None:
    """ranks that do not fit are left over"""
    no_topology_check(patch)
    patch.setattr(config.Config, "check_world", lambda self, size: None)


@kills("CONF-SHARDED-DIVIDES")
def sharding_divides_data_parallel(patch: Patch) -> None:
    """the sharded degree must divide the DP degree, not the RDP degree (SMP_API.md 8.3)"""
    no_topology_check(patch)

    def check_world(self: config.Config, size: int) -> None:
        if (size // self.pipeline_parallel_degree) % self.sharded_data_parallel_degree:
            raise ConfigError("sharded_data_parallel_degree")

    patch.setattr(config.Config, "check_world", check_world)


for _id, *_keys in [
    ("CONF-TENSOR-DDP", "tensor_parallel_degree", "ddp"),
    ("CONF-BF16-SHARDED", "bf16", "sharded_data_parallel_degree"),
    ("CONF-FP16-BF16", "fp16", "bf16"),
    ("CONF-SHARDED-PIPELINE", "sharded_data_parallel_degree", "pipeline_parallel_degree"),
    ("CONF-SHARDED-OPTIMIZER", "sharded_data_parallel_degree", "shard_optimizer_state"),
    (
        "CONF-SHARDED-PRESCALED",
        *("sharded_data_parallel_degree", "tensor_parallel_degree", "prescaled_batch"),
    ),
    ("CONF-DEFAULT-PARTITION", "auto_partition", "default_partition"),
    ("CONF-DEFAULT-PARTITION", "default_partition", "pipeline_parallel_degree"),
]:
    _plant = without_rule(*_keys)
    _plant.__doc__ = f"no rule between {', '.join(_keys)}"
    kills(_id)(_plant)


@kills("CONF-BF16-SHARDED")
def init_knows_no_rules(patch: Patch) -> None:
    """init accepts what the harness refuses"""
    init = smp.init

    def accept(given: Any = None) -> None:
        try:
            init(given)
        except ConfigError:
            init()

    patch.setattr(smp, "init", accept)


@kills("GROUP-NAMES")
def wrong_short_name(patch: Patch) -> None:
    """smp.RDP_GROUP is DP_GROUP"""
    patch.setattr(smp, "RDP_GROUP", smp.CommGroup.DP_GROUP)


@kills("GROUP-NAMES")
def three_rank_types(patch: Patch) -> None:
    """RankType has the three members of seed 000 only (SMP_API.md 8.8)"""
    documented = [smp.RankType.WORLD_RANK, smp.RankType.MP_RANK, smp.RankType.DP_RANK]
    patch.setattr(smp, "RankType", documented)


@kills("GROUP-WORLD")
def ranks_backwards(patch: Patch) -> None:
    """rank counts from the end"""
    wrap(patch, "rank", lambda rank: smp.size() - 1 - rank())


@kills("GROUP-WORLD")
def size_is_last_rank(patch: Patch) -> None:
    """size is the largest rank"""
    wrap(patch, "size", lambda size: size() - 1)


@kills("GROUP-LOCAL")
def local_rank_from_1(patch: Patch) -> None:
    """local_rank counts from 1"""
    wrap(patch, "local_rank", lambda local_rank: local_rank() + 1)


@kills("GROUP-LOCAL")
def local_rank_0(patch: Patch) -> None:
    """local_rank is 0 everywhere"""
    patch.setattr(smp, "local_rank", lambda: 0)


@kills("GROUP-SIZES")
def mp_without_tp(patch: Patch) -> None:
    """mp_size leaves out tensor parallelism"""
    patch.setattr(smp, "mp_size", smp.pp_size)


@kills("GROUP-SIZES")
def dp_without_tp(patch: Patch) -> None:
    """dp_size leaves out tensor parallelism, so that mp x dp = size"""
    patch.setattr(smp, "dp_size", smp.rdp_size)


@kills("GROUP-PLACEMENT")
@kills("GROUP-TABLES")
def left_varies_fastest(patch: Patch) -> None:
    """the left-most letter varies fastest"""
    turned = {name: letters[::-1] for name, letters in topology.PLACEMENTS.items()}
    patch.setattr(topology, "PLACEMENTS", turned)


@kills("GROUP-PLACEMENT")
@kills("GROUP-TABLES")
def guide_is_the_default(patch: Patch) -> None:
    """cluster is DTP, as the guide's example suggests (SMP_API.md 8.7)"""
    patch.setattr(topology, "PLACEMENTS", {**topology.PLACEMENTS, "cluster": "DTP"})


@kills("GROUP-MEMBERS")
def dp_list_is_rdp(patch: Patch) -> None:
    """get_dp_group leaves out tensor parallelism"""
    patch.setattr(smp, "get_dp_group", smp.get_rdp_group)


@kills("GROUP-MEMBERS")
def mp_shares_the_wrong_coordinate(patch: Patch) -> None:
    """the members of an MP group share pp_rank"""
    shared = {**topology._SHARED, topology.GroupKind.MP: topology._SHARED[topology.GroupKind.DP]}
    patch.setattr(topology, "_SHARED", shared)


@kills("GROUP-POSITION")
def dp_rank_by_formula(patch: Patch) -> None:
    """dp_rank = rdp_rank * tp_size + tp_rank (SMP_API.md 4.2, reading b)"""
    patch.setattr(smp, "dp_rank", lambda: smp.rdp_rank() * smp.tp_size() + smp.tp_rank())


@kills("GROUP-POSITION")
def own_rank_first(patch: Patch) -> None:
    """get_mp_group lists the caller first"""
    wrap(patch, "get_mp_group", lambda get: sorted(get(), key=lambda rank: rank != smp.rank()))


@kills("GROUP-PROCESS-GROUPS")
def swapped_process_groups(patch: Patch) -> None:
    """get_tp_process_group gives the PP group"""
    patch.setattr(smp, "get_tp_process_group", smp.get_pp_process_group)


@kills("GROUP-PROCESS-GROUPS")
def process_group_of_the_world(patch: Patch) -> None:
    """get_rdp_process_group gives the world"""
    patch.setattr(smp, "get_rdp_process_group", smp.get_world_process_group)


@kills("GROUP-PROCESS-GROUPS-DDP")
def process_groups_without_ddp(patch: Patch) -> None:
    """process groups are there without ddp"""

    def give(call: str, kind: topology.GroupKind) -> Any:
        here = comm.current(call)
        return here.fabric.process_group(here.group(kind))

    patch.setattr(comm, "_process_group", give)


def received(patch: Patch, change: Callable[[Any], Any]) -> None:
    """Change what is received, and every part of it."""

    def deep(obj: Any) -> Any:
        if type(obj) in (list, tuple):
            return change(type(obj)(map(deep, obj)))
        if type(obj) is dict:
            return {key: deep(value) for key, value in obj.items()}
        return change(obj)

    wrap(patch, "recv_from", lambda recv, *args: deep(recv(*args)))


@kills("COMM-SEND-VALUE")
def tuples_become_lists(patch: Patch) -> None:
    """tuples arrive as lists, as through JSON"""
    received(patch, lambda obj: list(obj) if type(obj) is tuple else obj)


@kills("COMM-SEND-VALUE")
def true_is_1(patch: Patch) -> None:
    """True arrives as 1"""
    received(patch, lambda obj: 1 if obj is True else obj)


@kills("COMM-SEND-VALUE")
def zero_size_is_flat(patch: Patch) -> None:
    """tensors without elements lose their shape (BUGS.md B011)"""

    def flat(obj: Any) -> Any:
        return obj.reshape(-1) if isinstance(obj, torch.Tensor) and obj.numel() == 0 else obj

    received(patch, flat)


@kills("COMM-SEND-ORDER")
def newest_first(patch: Patch) -> None:
    """what a sender has sent last is received first"""
    mailbox(patch, take=-1)


@kills("COMM-SEND-ORDER")
def stale_receive(patch: Patch) -> None:
    """the receive buffer of a pair is filled once (BUGS.md B157)"""
    first = PerRun(dict)

    def recv_from(recv: Callable[..., Any], *args: Any) -> Any:
        got = recv(*args)
        return first().setdefault((smp.rank(), *args), got)

    wrap(patch, "recv_from", recv_from)


@kills("COMM-RECV-SOURCE")
def from_anybody(patch: Patch) -> None:
    """recv_from takes what came first, from any source"""
    mailbox(patch, any_source=True)


def rank_type_read_as(
    patch: Patch, of: Callable[[smp.RankType], smp.RankType], *names: str
) -> None:
    """Read rank types as others, in the calls named."""
    peer = comm._peer

    def read(here: Any, call: str, name: str, rank: object, kind: smp.RankType) -> int:
        return peer(here, call, name, rank, of(kind) if call in names else kind)

    patch.setattr(comm, "_peer", read)


@kills("COMM-RANK-TYPE", *ASSERTION, RankError, VerdictError)
def all_ranks_are_world_ranks(patch: Patch) -> None:
    """rank_type is ignored"""
    world = smp.RankType.WORLD_RANK
    rank_type_read_as(patch, lambda kind: world, "smp.send", "smp.recv_from")


@kills("COMM-RANK-TYPE", *ASSERTION, RankError, VerdictError)
def pp_rank_read_as_mp_rank(patch: Patch) -> None:
    """recv_from reads PP_RANK as MP_RANK"""
    other = {smp.RankType.PP_RANK: smp.RankType.MP_RANK}
    rank_type_read_as(patch, lambda kind: other.get(kind, kind), "smp.recv_from")


@kills("COMM-RANK-TYPE-MIXED", *ASSERTION, VerdictError)
def rank_types_match(patch: Patch) -> None:
    """recv_from waits for a send of the same rank type"""

    def recv_from(recv: Callable[..., Any], src: int, kind: smp.RankType) -> Any:
        sent_as, got = recv(src, kind)
        return got if sent_as is kind else recv(src, kind)

    wrap(patch, "send", lambda send, obj, dest, kind: send((kind, obj), dest, kind))
    wrap(patch, "recv_from", recv_from)


class ByReference(Payload):
    """A payload that is not copied."""

    def __init__(self, obj: object, call: str) -> None:
        self._data, self._atom = None, obj


class OneCopy(Payload):
    """A payload that is copied once, for all receivers."""

    def thaw(self) -> Any:
        """The copy, made at the first call."""
        self._data, self._atom = None, super().thaw()
        return self._atom


@kills("COMM-SEND-COPY")
@kills("COMM-BROADCAST-COPY")
@kills("COMM-ALLGATHER-COPY")
def by_reference(patch: Patch) -> None:
    """objects are shared between ranks"""
    patch.setattr(objects, "Payload", ByReference)


@kills("COMM-BROADCAST-COPY")
@kills("COMM-ALLGATHER-COPY")
def one_copy(patch: Patch) -> None:
    """all receivers share one copy"""
    patch.setattr(objects, "Payload", OneCopy)


@kills("COMM-ALLGATHER-COPY")
def own_element_by_reference(patch: Patch) -> None:
    """allgather puts the caller's own object into the list"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        got = gather(obj, group)
        return [
            obj if rank == smp.rank() else each
            for rank, each in zip(members(group), got, strict=True)
        ]

    wrap(patch, "allgather", allgather)


@kills("COMM-SEND-SYNC")
@kills("COMM-BROADCAST-SYNC")
def nobody_waits(patch: Patch) -> None:
    """send and broadcast return at once (BUGS.md B026)"""
    mailbox(patch)


@kills("COMM-BROADCAST-SYNC")
def one_receiver_is_enough(patch: Patch) -> None:
    """broadcast returns when one receiver has come"""

    mailbox(patch, wait_for_first=True)


@kills("COMM-KEYWORDS", TypeError)
def other_keyword(patch: Patch) -> None:
    """send calls its argument dest"""
    send = smp.send
    patch.setattr(smp, "send", lambda obj, dest, rank_type: send(obj, dest, rank_type))


@kills("COMM-KEYWORDS", TypeError)
def keywords_only(patch: Patch) -> None:
    """barrier takes its group by keyword only"""
    barrier = smp.barrier
    patch.setattr(smp, "barrier", lambda *, group=smp.WORLD: barrier(group))


@kills("COMM-BROADCAST-VALUE", VerdictError)
def first_rank_is_the_root(patch: Patch) -> None:
    """broadcast takes the first rank of the group for the root (BUGS.md B034)"""

    def broadcast(self: SimObjects, obj: object, group: Group) -> None:
        call = "smp.broadcast"
        self._post(call, Payload(obj, call), set(group.ranks[1:]))

    patch.setattr(SimObjects, "broadcast", broadcast)


@kills("COMM-BROADCAST-VALUE")
def roots_object_lost(patch: Patch) -> None:
    """receivers whose rank is above the root's receive None"""

    def recv_from(recv: Callable[..., Any], src: int, kind: smp.RankType) -> Any:
        got = recv(src, kind)
        return got if members(smp.CommGroup(kind.value))[src] > smp.rank() else None

    wrap(patch, "recv_from", recv_from)


@kills("COMM-BROADCAST-GROUP", *ASSERTION, VerdictError)
def broadcast_to_the_world(patch: Patch) -> None:
    """broadcast goes to the world (BUGS.md B043)"""
    wrap(patch, "broadcast", lambda broadcast, obj, group: broadcast(obj, smp.WORLD))


@kills("COMM-BROADCAST-ORDER")
def broadcasts_overtake(patch: Patch) -> None:
    """broadcasts overtake sends"""
    mailbox(patch, broadcast_first=True)


@kills("COMM-BROADCAST-ALONE", RankError)
def alone_is_an_error(patch: Patch) -> None:
    """a broadcast without receivers is refused"""

    def broadcast(original: Callable[..., None], obj: object, group: smp.CommGroup) -> None:
        if len(members(group)) == 1:
            raise RankError("smp.broadcast: nobody receives")
        original(obj, group)

    wrap(patch, "broadcast", broadcast)


@kills("COMM-ALLGATHER-ORDER")
def own_element_first(patch: Patch) -> None:
    """allgather's list begins with the caller's object"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        got, own = gather(obj, group), members(group).index(smp.rank())
        return [*got[own:], *got[:own]]

    wrap(patch, "allgather", allgather)


@kills("COMM-ALLGATHER-ORDER")
def gathered_sorted(patch: Patch) -> None:
    """allgather's list is sorted by value"""
    wrap(patch, "allgather", lambda gather, obj, group: sorted(gather(obj, group)))


@kills("COMM-ALLGATHER-VALUE")
def fixed_buffer(patch: Patch) -> None:
    """objects are cut off at 64 KiB (BUGS.md B148)"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        return [each[:65536] if type(each) is bytes else each for each in gather(obj, group)]

    wrap(patch, "allgather", allgather)


@kills("COMM-ALLGATHER-VALUE")
def none_brings_nothing(patch: Patch) -> None:
    """a rank that brings None is left out (BUGS.md B145)"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        return [each for each in gather(obj, group) if each is not None]

    wrap(patch, "allgather", allgather)


def remember(patch: Patch, key: Callable[[smp.CommGroup, int], Any]) -> None:
    """allgather returns what it returned before to a call of the same ``key``.

    Args:
        key: of the group and the number of the call on that kind of group.
    """
    memory = PerRun(lambda: (defaultdict(int), {}))

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        counts, results = memory()
        counts[smp.rank(), group] += 1
        got = gather(obj, group)
        found: list[Any] = results.setdefault(
            (smp.rank(), key(group, counts[smp.rank(), group])), got
        )
        return found

    wrap(patch, "allgather", allgather)


@kills("COMM-ALLGATHER-REPEATED")
def stale_gather(patch: Patch) -> None:
    """a group's second allgather returns the list of its first (BUGS.md B157)"""
    remember(patch, lambda group, number: group)


@kills("COMM-ALLGATHER-KINDS")
def kinds_share_results(patch: Patch) -> None:
    """the n-th allgather of two kinds is one if their members are the same (BUGS.md B155)"""
    remember(patch, lambda group, number: (members(group), number))


@kills("COMM-ALLGATHER-GROUP", VerdictError)
def gather_waits_for_the_world(patch: Patch) -> None:
    """an allgather waits for all groups of its kind"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        smp.barrier()
        return list(gather(obj, group))

    wrap(patch, "allgather", allgather)


@kills("COMM-BARRIER-ALL")
@kills("COMM-BARRIER-DEFAULT")
def barrier_does_nothing(patch: Patch) -> None:
    """a barrier waits for nobody"""
    patch.setattr(smp, "barrier", lambda group=smp.WORLD: None)


@kills("COMM-BARRIER-ALL")
def barrier_waits_for_the_first(patch: Patch) -> None:
    """a barrier waits for the first rank of the group only"""

    def barrier(original: Callable[..., None], group: smp.CommGroup = smp.WORLD) -> None:
        here, ranks = smp.rank(), members(group)
        if here != ranks[0]:
            smp.recv_from(ranks[0], smp.RankType.WORLD_RANK)
        for each in ranks[1:] if here == ranks[0] else []:
            smp.send("go", each, smp.RankType.WORLD_RANK)

    wrap(patch, "barrier", barrier)


@kills("COMM-BARRIER-GROUP", VerdictError)
def barrier_of_the_world(patch: Patch) -> None:
    """a barrier is always one of the world"""
    wrap(patch, "barrier", lambda barrier, group=smp.WORLD: barrier(smp.WORLD))


@kills("COMM-BARRIER-DEFAULT", *ASSERTION, VerdictError)
def barrier_default_is_mp(patch: Patch) -> None:
    """barrier() is of the MP group"""
    wrap(patch, "barrier", lambda barrier, group=smp.MP_GROUP: barrier(group))


@kills("COMM-BARRIER-MP-DP", *ASSERTION, VerdictError)
def mp_barrier_of_pp(patch: Patch) -> None:
    """mp_barrier is one of the PP group"""
    patch.setattr(smp, "mp_barrier", lambda: smp.barrier(smp.PP_GROUP))


@kills("COMM-BARRIER-MP-DP", *ASSERTION, VerdictError)
def dp_barrier_of_the_world(patch: Patch) -> None:
    """dp_barrier is one of the world"""
    patch.setattr(smp, "dp_barrier", smp.barrier)


def lenient_peer(patch: Patch, forgive: Callable[[int, int], int]) -> None:
    """Correct a rank, given it and the group's size, before it is judged."""
    peer = comm._peer

    def correct(here: Any, call: str, name: str, rank: int, kind: smp.RankType) -> int:
        return peer(here, call, name, forgive(rank, len(here.group(kind.value).ranks)), kind)

    patch.setattr(comm, "_peer", correct)


@kills("COMM-ERROR-RANK", *ASSERTION, VerdictError)
def ranks_wrap_around(patch: Patch) -> None:
    """ranks below 0 count from the end"""
    lenient_peer(patch, lambda rank, size: rank + size if rank < 0 else rank)


@kills("COMM-ERROR-RANK", *ASSERTION, VerdictError)
def one_rank_too_many(patch: Patch) -> None:
    """the size of the group is taken for its last rank"""
    lenient_peer(patch, lambda rank, size: size - 1 if rank == size else rank)


@kills("COMM-ERROR-SELF")
def to_myself_is_ignored(patch: Patch) -> None:
    """a send to oneself does nothing"""

    def send(original: Callable[..., None], obj: object, dest: int, kind: smp.RankType) -> None:
        if members(smp.CommGroup(kind.value))[dest] != smp.rank():
            original(obj, dest, kind)

    wrap(patch, "send", send)


class Described(Payload):
    """A payload that sends a description of what cannot be pickled."""

    def __init__(self, obj: object, call: str) -> None:
        try:
            super().__init__(obj, call)
        except PayloadError:
            super().__init__(repr(obj), call)


@kills("COMM-ERROR-PICKLE", *ASSERTION, VerdictError)
def unpicklable_described(patch: Patch) -> None:
    """of an unpicklable object its description is sent (BUGS.md B146)"""
    patch.setattr(objects, "Payload", Described)


@kills("COMM-ERROR-PICKLE", *ASSERTION, VerdictError)
def pickled_too_late(patch: Patch) -> None:
    """allgather joins before it pickles, so the failed call counts"""

    def allgather(gather: Callable[..., Any], obj: object, group: smp.CommGroup) -> list[Any]:
        try:
            return list(gather(obj, group))
        except PayloadError:
            gather(None, group)
            raise

    wrap(patch, "allgather", allgather)


# ---- The tests -----------------------------------------------------------------------------------


def test_every_requirement_has_a_mutant() -> None:
    assert {mutant.requirement for mutant in MUTANTS} == set(REQUIREMENTS)


def test_every_requirement_has_a_property() -> None:
    assert set(properties()) == set(REQUIREMENTS)


@pytest.mark.parametrize("id", REQUIREMENTS)
def test_the_reference_passes(smp_world: SmpWorld, smp_tmp_path: TmpPath, id: str) -> None:
    for each in properties()[id]:
        each.run(smp_world, smp_tmp_path)


@pytest.mark.parametrize(
    "mutant", MUTANTS, ids=lambda mutant: f"{mutant.requirement}: {mutant.sentence}"
)
def test_a_mutant_is_killed(smp_world: SmpWorld, smp_tmp_path: TmpPath, mutant: Mutant) -> None:
    killed = 0
    with pytest.MonkeyPatch.context() as patch:
        mutant.plant(patch)
        for each in properties()[mutant.requirement]:
            try:
                each.run(smp_world, smp_tmp_path)
            except mutant.by:
                killed += 1
    assert killed, f"survived: {mutant.sentence}"
