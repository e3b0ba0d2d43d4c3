"""The file of expected failures: read and checked before anything runs, and written from what failed.

The file is TOML and is kept in the repository of the backend's author::

    version = 1

    [[expected]]
    id = "COMM-SEND-SYNC"     # or a glob: "COMM-BARRIER-*"
    reason = "send returns as soon as the object has left"
    link = "https://example.com/issues/7"
    intermittent = true       # optional: it fails in some runs only, and a pass is not stale

The examples that failed are beside the file, in the folder ``FILE.examples``, and are tried first.

Every entry must match a requirement, and no requirement may match two entries. A waiver without effect,
or with two reasons, would go unnoticed.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import json
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from conformance.session.verdicts import Verdict

VERSION = 1
TODO = "TODO"  #: the beginning of a reason or a link that the tool wrote and a person must fill in
_FIELDS = ("id", "reason", "link")
_INTERMITTENT = "intermittent"
_HEADER = re.compile(r"^[ \t]*\[\[[ \t]*expected[ \t]*\]\]", re.MULTILINE)


class ExpectationError(Exception):
    """Raised when a file of expected failures cannot be used; names the file, the entry and the reason."""


@dataclasses.dataclass(frozen=True, slots=True)
class Expectation:
    """One entry: the requirements that match ``id``, an exact id or a glob, are expected to fail."""

    id: str
    reason: str
    link: str
    intermittent: bool = False  # fails in some runs only: a pass does not make the entry stale
    place: str = dataclasses.field(default="", compare=False)  # "expected.toml:3: entry 1"

    def matches(self, id: str) -> bool:
        """Return whether the entry covers the requirement of this id."""
        return id == self.id or (self.glob and fnmatchcase(id, self.id))

    @property
    def glob(self) -> bool:
        """True if ``id`` is a glob."""
        return not {"*", "?", "["}.isdisjoint(self.id)

    @property
    def todo(self) -> bool:
        """True if the reason or the link is still the tool's TODO."""
        return any(text.strip().upper().startswith(TODO) for text in (self.reason, self.link))

    def __str__(self) -> str:
        return f"{self.reason} ({self.link})"


# ---- Reading -------------------------------------------------------------------------------------


def read(path: Path) -> list[Expectation]:
    """Read the entries of a file, in the order of the file.

    Raises ExpectationError for a file that cannot be read, is not TOML, or has a field missing,
    unknown or of a wrong type.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ExpectationError(f"{path.name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ExpectationError(f"{path.name}: not UTF-8: {error.reason}") from None
    return parse(text, path.name)


def examples_of(path: Path) -> Path:
    """The folder of the examples that failed, beside the file of expected failures."""
    return path.with_name(f"{path.name}.examples")


def file_of(named: Path | str | None) -> Path | None:
    """The file that a backend names: a path, or ``package:path`` below an importable package.

    Raises ExpectationError if there is no such package or the path is not absolute: a backend cannot know
    the folder that a session is started in. Returns None if the backend names no file.
    """
    if named is None:
        return None
    package, separator, rest = str(named).partition(":")
    if isinstance(named, str) and separator and package.replace(".", "").isidentifier():
        try:
            spec = importlib.util.find_spec(package)
        except ImportError:
            spec = None
        if spec is None or not spec.submodule_search_locations:
            raise ExpectationError(f"its expectations are {named!r}: there is no package {package}")
        return Path(spec.submodule_search_locations[0], rest)
    path = Path(named)
    if not path.is_absolute():
        raise ExpectationError(
            f"its expectations are {str(named)!r}: write Path(__file__).with_name({path.name!r}), or "
            f"'package:{path.name}'"
        )
    return path


def parse(text: str, name: str) -> list[Expectation]:
    """Parse the entries of a text in TOML; messages call the file ``name``. Raises ExpectationError."""
    try:
        document = tomllib.loads(text)
    except (
        ValueError,
        RecursionError,
    ) as error:  # ... or numbers, dates and nesting beyond Python's
        raise ExpectationError(f"{name}: not TOML: {error}") from None
    _refuse_unknown(document, ("version", "expected"), name)
    version = document.get("version")
    if type(version) is not int or version != VERSION:
        told = "there is no version" if version is None else f"version = {version!r}"
        raise ExpectationError(f"{name}: {told}; this suite reads version = {VERSION}")
    entries = document.get("expected", [])
    if not isinstance(entries, list) or not all(isinstance(each, dict) for each in entries):
        raise ExpectationError(f"{name}: expected is no list of entries: write [[expected]]")
    lines = [text.count("\n", 0, found.start()) + 1 for found in _HEADER.finditer(text)]
    exact = len(lines) == len(entries)  # false for inline tables, whose lines are not known
    return [
        _entry(each, f"{name}:{lines[n]}: entry {n + 1}" if exact else f"{name}: entry {n + 1}")
        for n, each in enumerate(entries)
    ]


def _entry(fields: Mapping[str, Any], place: str) -> Expectation:
    if isinstance(fields.get("id"), str):
        place += f" ({fields['id']})"
    _refuse_unknown(fields, (*_FIELDS, _INTERMITTENT), place)
    intermittent = fields.get(_INTERMITTENT, False)
    if not isinstance(intermittent, bool):
        raise ExpectationError(f"{place}: {_INTERMITTENT} = {intermittent!r} is not true or false")
    for name in _FIELDS:
        if name not in fields:
            raise ExpectationError(f"{place}: no {name}")
        value = fields[name]
        if not isinstance(value, str):
            raise ExpectationError(f"{place}: {name} = {value!r} is not a text")
        if not value.strip():
            raise ExpectationError(f"{place}: its {name} is empty")
    return Expectation(**fields, place=place)


def _refuse_unknown(fields: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for name in fields:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(known)}"
            raise ExpectationError(f"{place}: unknown key {name!r}: {hint}")


def check(entries: Sequence[Expectation], ids: Collection[str]) -> dict[str, Expectation]:
    """The expected failures by the requirement's id.

    Args:
        entries: the entries of the file.
        ids: the ids of all requirements.

    Raises:
        ExpectationError: an entry has no reason yet, its link is no URL, it matches no requirement,
            or it matches a requirement that another entry matches.
    """
    found: dict[str, Expectation] = {}
    for entry in entries:
        if entry.todo:
            raise ExpectationError(
                f"{entry.place}: it still says {TODO}: say why this is expected to fail, and where "
                "that is tracked"
            )
        if not _is_url(entry.link):
            raise ExpectationError(f"{entry.place}: link = {entry.link!r} is not a URL")
        matched = [id for id in ids if entry.matches(id)]
        if not matched:
            near = difflib.get_close_matches(entry.id, ids, n=1, cutoff=0)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise ExpectationError(f"{entry.place}: matches no requirement{hint}")
        for id in matched:
            if id in found:
                raise ExpectationError(
                    f"{entry.place}: {id} is expected already: {found[id].place}"
                )
            found[id] = entry
    return found


def _is_url(link: str) -> bool:
    try:
        parts = urlsplit(link)
    except ValueError:  # "https://[bad"
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname)


# ---- Writing -------------------------------------------------------------------------------------


def updated(
    entries: Sequence[Expectation],
    verdicts: Mapping[str, Verdict],
    failed: Collection[str],
) -> list[Expectation]:
    """The entries that the file should have after a run, in the order of the requirements.

    An entry stays if every supported requirement that it matches failed or was left out, or if it is
    intermittent and one of them is supported. Of a glob that also matches a requirement that passed, the
    others get an entry each, with its reason and link. A failed requirement without an entry gets a new one.

    Args:
        entries: the entries of the file before.
        verdicts: the verdict on every requirement, by id.
        failed: the ids of requirements that failed in a way that can be waived.
    """
    known = list(verdicts)
    stays = {id for id in known if id in failed or verdicts[id] is Verdict.SKIPPED}
    covered: set[str] = set()
    kept: list[tuple[int, Expectation]] = []
    for entry in entries:
        matched = [id for id in known if entry.matches(id) and id not in covered]
        matched = [id for id in matched if verdicts[id] is not Verdict.NOT_SUPPORTED]
        hits = [id for id in matched if id in stays or entry.intermittent]
        covered.update(hits)
        ids = [entry.id] if hits and hits == matched else hits
        first = known.index(hits[0]) if hits else 0
        for id in ids:
            at = known.index(id) if id in verdicts else first
            kept.append((at, dataclasses.replace(entry, id=id)))
    new = [
        (at, Expectation(id, f"{TODO}: why this is expected", f"{TODO}: where it is tracked"))
        for at, id in enumerate(known)
        if id in failed and id not in covered
    ]
    return [entry for _, entry in sorted(kept + new, key=lambda each: each[0])]


def written(entries: Sequence[Expectation], errors: Mapping[str, str]) -> str:
    """Write the entries in TOML; an entry with a TODO gets its requirement's error as a comment."""
    return "\n".join(_lines(entries, errors)) + "\n"


def _lines(entries: Sequence[Expectation], errors: Mapping[str, str]) -> Iterator[str]:
    yield "# Expected failures, by requirement. `pytest --smp-write-expectations=FILE` writes this file"
    yield "# anew: it keeps reasons and links, and no comments."
    yield f"version = {VERSION}"
    for entry in entries:
        yield ""
        yield "[[expected]]"
        if entry.todo and entry.id in errors:
            yield f"# {_printable(errors[entry.id])}"
        for name in _FIELDS:
            yield f"{name} = {_string(getattr(entry, name))}"
        if entry.intermittent:
            yield f"{_INTERMITTENT} = true"


def _string(text: str) -> str:
    # TOML's basic strings have all of JSON's escapes, and also forbid a raw DEL.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _printable(text: str) -> str:
    line = text.partition("\n")[0][:200]
    return "".join(each if each.isprintable() else "?" for each in line)
