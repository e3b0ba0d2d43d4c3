"""The search for the user's line in a stack, and the cut of a traceback down to the user's code."""

from __future__ import annotations

import contextlib
import functools
import gc
import linecache
import os
import sys
import threading
import types
from collections.abc import Iterator

_OWN = tuple(
    os.path.join(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))), name)
    + os.sep
    for name in ("smp_core", "pytest_smp")
)


# Where torch.distributed's public functions stand; any other file of torch calls on its own account. A
# coalescing manager calls at the end of its block, through contextlib.
FRONT_DOOR = (
    *("distributed_c10d.py", "c10d_logger.py", "typing_extensions.py", "warnings.py"),
    "contextlib.py",
)
# The files in which torch wraps its deprecated names: all_gather_into_tensor, reduce_scatter_tensor.
_WRAPPERS = ("typing_extensions", "warnings")
# The modules whose functions call a user's function in a thread.
_THREADS = ("concurrent.futures.thread", "multiprocessing.pool", "asyncio.threads")


def _torch_root() -> str | None:
    torch = sys.modules.get("torch")
    file = getattr(torch, "__file__", None)
    return os.path.dirname(file) + os.sep if file else None


def is_ours(filename: str) -> bool:
    """Return whether a file belongs to this project's packages for users."""
    return filename.startswith(_OWN)


def is_own_code(code: types.CodeType) -> bool:
    """Return whether code is of this project's packages for users."""
    return is_ours(code.co_filename)


def is_plumbing(code: types.CodeType) -> bool:
    """Ours, torch's, or the thread machinery below a rank: never the line that a user wants to see."""
    return _is_plumbing(code.co_filename)


# A file of torch's is not asked about before torch is being imported, so the answer does not change.
@functools.lru_cache(maxsize=4096)
def _is_plumbing(name: str) -> bool:
    if name.startswith(_OWN) or name.startswith("<frozen "):
        return True
    root = _torch_root()
    if root is not None and name.startswith(root):
        return True
    if name in (contextlib.__file__, threading.__file__):
        return True
    return any(
        name == getattr(sys.modules.get(module), "__file__", None)
        for module in (*_WRAPPERS, *_THREADS)
    )


#: Files whose functions communicate or wait themselves: the calls that messages name.
_PRIMITIVES = (os.sep + "comm.py", os.path.join(os.sep, "futures", "__init__.py"))
#: The ends of the names of torch.distributed's functions that are made of other collectives.
_COMPOSED = ("_object", "_object_list")


def _entry(file: str, name: str) -> str:
    """The name by which a script calls this function of a library; "" for one that no script calls, or
    whose name a message gives anyway.
    """
    last = name.rpartition(".")[2]
    public = not last.startswith("_") or last in ("__init__", "__call__")
    front = file.endswith((*FRONT_DOOR, *_PRIMITIVES)) and not name.endswith(_COMPOSED)
    if not public or "<" in name or front:
        return ""
    name = name.removesuffix(".__init__").removesuffix(".__call__")
    if not is_ours(file):
        root = _torch_root()
        return name if root is not None and file.startswith(root) else ""
    inner = (os.sep + "transport" + os.sep, os.sep + "pytest_smp" + os.sep)
    if any(part in file for part in inner):
        return ""
    return name if "." in name else f"smp.{name}"


# Each call of a rank walks its stack, so what a function contributes to a Place is computed once.
@functools.lru_cache(maxsize=4096)
def _library_function(file: str, name: str) -> tuple[bool, str] | None:
    """Return whether a function of a library keeps a call direct, and its entry (see Place); None for a user's.

    ``name``: qualified.
    """
    if not _is_plumbing(file):
        return None
    return is_ours(file) or file.endswith(FRONT_DOOR), _entry(file, name)


class Place:
    """A line of the user's, rendered only when somebody reads it.

    Without a file, ``function`` says where the call was made: in a thread that runs no line of the user's.

    Attributes:
        direct: the line calls us itself, or by torch.distributed's own functions.
        entry: the function that the line calls and that communicates on its own account, or "".
    """

    __slots__ = ("direct", "entry", "filename", "function", "lineno")

    def __init__(
        self, filename: str, lineno: int, function: str, direct: bool = True, entry: str = ""
    ) -> None:
        self.filename, self.lineno, self.function = filename, lineno, function
        self.direct, self.entry = direct, entry

    def __str__(self) -> str:
        if not self.filename:
            return self.function
        source = linecache.getline(self.filename, self.lineno).strip()
        where = f"{relative(self.filename)}:{self.lineno} in {self.function}"
        if self.entry:
            where += f", by {self.entry}"
        return f"{where}:  {source}" if source else where

    def traceback(self) -> types.TracebackType | None:
        """A traceback of this line alone, for an error that is raised where no frame of it is."""
        if not self.filename:
            return None
        text = "\n" * (self.lineno - 1) + "raise _Here"
        code = compile(text, self.filename, "exec").replace(co_name=self.function)
        try:
            exec(code, {"_Here": _Here, "__name__": "<a rank>", "__file__": self.filename})
        except _Here as here:
            entry = here.__traceback__
            return None if entry is None else entry.tb_next
        return None


class _Here(Exception):
    """Raised to make a traceback."""


def relative(filename: str) -> str:
    """A file as seen from the working folder, where it lies below it."""
    try:
        relative = os.path.relpath(filename)
    except (ValueError, OSError):  # another drive; no working folder
        return filename
    return filename if relative.startswith("..") else relative


def _frames(frame: types.FrameType | None) -> Iterator[types.FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Pause garbage collection while the interpreter lists all threads.

    CPython 3.11 holds a lock meanwhile, and a collection that frees a ``threading.local`` then waits for that lock
    for ever.
    """
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def thread_frames() -> dict[int, types.FrameType]:
    """The current frame of every thread, by its identifier."""
    with collection_paused():
        return sys._current_frames()


def user_frame(frame: types.FrameType | None) -> tuple[types.FrameType | None, bool, str]:
    """The frame of the innermost line of the user's in this stack, or None, and the attributes ``direct`` and
    ``entry`` of its Place.
    """
    direct, entry = True, ""
    while frame is not None:
        code = frame.f_code
        function = _library_function(code.co_filename, code.co_qualname)
        if function is None:
            break
        direct, entry = direct and function[0], function[1] or entry
        frame = frame.f_back
    return frame, direct, entry


def user_place(frame: types.FrameType | None) -> Place | None:
    """The innermost line of the user's in this stack, or None where there is none."""
    frame, direct, entry = user_frame(frame)
    if frame is None:
        return None
    code = frame.f_code
    return Place(code.co_filename, frame.f_lineno, code.co_name, direct, entry)


def user_line(depth: int) -> tuple[str, int] | None:
    """File and number of the user's line in the caller's stack, ``depth`` frames below the caller."""
    frame: types.FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not _is_plumbing(name):
            return name, frame.f_lineno
        frame = frame.f_back
    return None


def caller_place() -> Place | None:
    """The user's line that called into us."""
    return user_place(sys._getframe(1))


def is_called_by_body() -> bool:
    """Return whether a line of the user's makes the call in which the caller is, and no function of a library does
    on its own account, as ``smp.init`` and checkpoints do.
    """
    place = user_place(sys._getframe(1))
    return place is not None and not place.entry


def stack_text(frame: types.FrameType) -> str:
    """A thread's stack, outermost first, without our own frames at its two ends."""
    frames = list(_frames(frame))[::-1]
    own = [
        is_own_code(each.f_code) or each.f_code.co_filename == threading.__file__ for each in frames
    ]
    if not all(own):
        first, last = own.index(False), len(own) - own[::-1].index(False)
        frames = frames[first:last]
    lines = []
    for each in frames:
        code = each.f_code
        lines.append(
            f'  File "{relative(code.co_filename)}", line {each.f_lineno}, in {code.co_name}'
        )
        source = linecache.getline(code.co_filename, each.f_lineno).strip()
        if source:
            lines.append(f"    {source}")
    return "\n".join(lines)


def cut_traceback(error: BaseException, *, ours: bool) -> None:
    """Cut ``error.__traceback__`` down to the user's part of it, in place.

    This project's frames above the body always go. Where the project raised the error on purpose
    (``ours``), the frames below the user's last line go too: Hypothesis tells failures apart by
    the last line of the traceback, and one line of the project's would make all deadlocks one failure.
    """
    entries: list[types.TracebackType] = []
    entry = error.__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    start = 0
    while start < len(entries) and is_own_code(entries[start].tb_frame.f_code):
        start += 1
    stop = len(entries)
    if ours:
        while stop > start and is_plumbing(entries[stop - 1].tb_frame.f_code):
            stop -= 1
    if start == stop:  # no line of the user's: keep everything
        return
    tail: types.TracebackType | None = None
    for entry in reversed(entries[start:stop]):
        tail = types.TracebackType(tail, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    error.__traceback__ = tail
