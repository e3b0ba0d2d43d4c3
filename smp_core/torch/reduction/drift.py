"""Ranks that hold the same parameters, and no longer do, are found at the end of the step.

Each rank adds up the bits of the trained parameters that others hold, too, weighed by their place: one pass over their
memory, as cheap as multiplying them by a number. One checksum of all of them travels with the message that ends every
step (execution/agreement.py); only if checksums differ do ranks exchange those of each parameter, to name it.

Compared are trained parameters, because replicas start from one set of values and apply one gradient. A frozen
parameter or a buffer may be a rank's own, as running statistics are; so may be the state of a random generator.
The state of an optimizer shows in the parameters at its next update. Replicas whose gradients a communication hook
of the user's reduces may differ as the hook wants it.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch

from smp_core.runtime import Runtime
from smp_core.topology import GroupKind
from smp_core.torch.exceptions import ReplicaDriftError

#: The factors of a block's 64-bit words in the checksum, by place: odd, so that each bit of a word counts; the same
#: on every rank.
_WEIGHTS = torch.randint(
    -(2**63),
    2**63 - 1,
    (2**13,),
    dtype=torch.int64,
    device="cpu",
    generator=torch.Generator("cpu").manual_seed(0),
).bitwise_or(1)


def digest(tensor: torch.Tensor) -> int:
    """64 bits of the tensor's bits and their order: NaNs and signs of zeros count, too.

    Words are added up in blocks, each times a number of its place, modulo 2^64; the blocks' sums are hashed.
    """
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        if tensor.layout is not torch.strided:
            return 0
        plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
        if plain.storage_offset() * plain.element_size() % 8:
            plain = plain.clone()
        flat = plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
        even = len(flat) // 8 * 8
        hashed = hashlib.blake2b(bytes(flat[even:].tolist()), digest_size=8)
        if even:
            words, size = flat[:even].view(torch.int64), len(_WEIGHTS)
            whole = len(words) // size * size
            sums = torch.mv(words[:whole].view(-1, size), _WEIGHTS).tolist() if whole else []
            if whole < len(words):
                sums.append(int(torch.dot(words[whole:], _WEIGHTS[: len(words) - whole])))
            hashed.update(struct.pack(f"<{len(sums)}q", *sums))
    return int.from_bytes(hashed.digest(), "little")


def checksum(digests: Iterable[int]) -> int:
    """One number for many: of 64 bits."""
    packed = b"".join(struct.pack("<Q", each) for each in digests)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


def differ(checksums: Mapping[int, int | None], groups: Iterable[Sequence[int]]) -> bool:
    """Return whether two ranks of one of the groups have different checksums. Ranks without a checksum do not count."""
    return any(len(set(map(checksums.get, group)) - {None}) > 1 for group in groups)


def found(
    runtime: Runtime,
    kind: GroupKind,
    what: str,
    own: Mapping[str, int],
    groups: Iterable[Sequence[int]],
    *,
    missing: bool = False,
) -> ReplicaDriftError | None:
    """The error that names the first digest in which ranks differ, and those ranks; None if there is no difference.

    A digest that only some ranks have is a difference with ``missing`` alone. All ranks of the group ``kind`` call
    this function and get the same answer; ``own`` maps names to this rank's digests.
    """
    members = runtime.group(kind)
    answers = runtime.fabric.objects.allgather(dict(own), members)
    digests: dict[int, dict[str, int]] = dict(zip(members.ranks, answers, strict=True))
    different: list[tuple[str, list[int], list[int]]] = []
    for group in groups:
        ranks = [rank for rank in group if rank in digests]
        for name in dict.fromkeys(name for rank in ranks for name in digests[rank]):
            values = {
                rank: digests[rank].get(name) for rank in ranks if missing or name in digests[rank]
            }
            if len(set(values.values())) > 1:
                # The value of most ranks counts as right; without a majority the lowest rank's does.
                usual, _ = Counter(values.values()).most_common(1)[0]
                odd = [rank for rank, value in values.items() if value != usual]
                different.append((name, odd, [rank for rank in values if rank not in odd]))
    if not different:
        return None
    name, odd, others = different[0]
    more = f" (and {len(different) - 1} more differ)" if len(different) > 1 else ""
    return ReplicaDriftError(
        f"step {runtime.training.steps}: replicas have drifted apart: {what} {name!r} of {_ranks(odd)} is not that "
        f"of {_ranks(others)}{more}. Since the last step something has treated ranks differently: an update, a "
        "clipping or a load on some of them only, or with other numbers. Do the same on all ranks, and start "
        "again from a checkpoint"
    )


def frozen(
    runtime: Runtime, names: Sequence[str], trained: Mapping[int, bytes]
) -> ReplicaDriftError | None:
    """The error that names a parameter which some ranks train and others do not; None if there is none. ``trained``
    has a byte for each of ``names``, by rank, in one order on all ranks; a rank without any does not count.
    """
    flagged = {rank: flags for rank, flags in trained.items() if flags}
    columns = enumerate(zip(*flagged.values(), strict=False))
    place = next((n for n, flags in columns if len(set(flags)) > 1), None)
    if place is None:
        return None
    on = [rank for rank, flags in flagged.items() if flags[place]]
    off = [rank for rank in flagged if rank not in on]
    return ReplicaDriftError(
        f"step {runtime.training.steps}: replicas have drifted apart: parameter {names[place]!r} is trained on "
        f"{_ranks(on)} and frozen on {_ranks(off)}. No gradient was changed. Set requires_grad alike on all ranks"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))
