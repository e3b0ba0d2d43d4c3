"""The sizes of the two buffers of SMDDP's gather, which environment variables give (AWS Sharded Data Parallelism,
Supported configurations). Launchers check them before a rank starts, without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from smp_core.errors import ConfigError

_UNIT = 8192  # bytes: sizes of buffers are multiples


class GatherBuffers(NamedTuple):
    """The sizes of SMDDP's buffers, in bytes."""

    scratch: int  #: holds what a rank brings
    sort: int  #: holds an eighth of what all bring

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> GatherBuffers:
        """The sizes of an environment. Raises ConfigError for one that is no positive multiple of 8192."""
        return cls(
            _size(environment, "SMDDP_AG_SCRATCH_BUFFER_SIZE_BYTES", 16 * 2**20),
            _size(environment, "SMDDP_AG_SORT_BUFFER_SIZE_BYTES", 128 * 2**20),
        )

    def refusal(self, count: int, degree: int) -> str:
        """The reason why a gather of ``count`` bytes of each of ``degree`` ranks does not fit; empty if it does."""
        if count > self.scratch:
            return f"{count} bytes are more than the scratch buffer's {self.scratch}"
        if degree * count > 8 * self.sort:
            return (
                f"an eighth of {degree} x {count} bytes is more than the sort buffer's {self.sort}"
            )
        return ""


def _size(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, "")
    if not text:
        return default
    if not text.isdecimal() or int(text) == 0 or int(text) % _UNIT:
        raise ConfigError(f"{name}={text!r} is no positive multiple of {_UNIT} (bytes)")
    return int(text)
