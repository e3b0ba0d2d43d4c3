"""Examples that failed, kept beside the file of expected failures."""

from __future__ import annotations

from pathlib import Path

from hypothesis.database import (
    DirectoryBasedExampleDatabase,
    ExampleDatabase,
    MultiplexedDatabase,
    ReadOnlyDatabase,
)


class _KeptExamples(DirectoryBasedExampleDatabase):
    """A folder of examples that stay even if they pass: a defect may show in some runs only."""

    def delete(self, key: bytes, value: bytes) -> None:
        """Keep the example."""


def replayed_examples(
    own: ExampleDatabase | None, kept: Path | None, target: Path | None
) -> ExampleDatabase | None:
    """The examples that an expected failure tries first.

    Hypothesis takes a saved example for shrunk, so a later run of an unexpected failure would not shrink it: ``own``
    gets none.

    Args:
        own: the user's database.
        kept: the folder beside the file of expected failures; it may be missing.
        target: the folder that gets the examples that fail.
    """
    databases: list[ExampleDatabase] = [] if own is None else [ReadOnlyDatabase(own)]
    if kept is not None and kept != target and kept.is_dir():
        databases.append(ReadOnlyDatabase(DirectoryBasedExampleDatabase(kept)))
    if target is not None:
        databases.append(_KeptExamples(target))
    return MultiplexedDatabase(*databases) if databases else None
