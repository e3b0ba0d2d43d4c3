"""A rank's check whether an untried version of torch works on `sim`.

Each call goes through a private part of torch: the state of torch.distributed that belongs to the
rank, the registry of groups, works and their futures, functional collectives, new groups, messages.
"""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional

LIMIT = 30.0  # seconds; the run itself takes milliseconds


def body() -> None:
    """Make the calls. Raises AssertionError for the first one with wrong values, or an error of torch."""
    rank = dist.get_rank()
    mine, one = torch.tensor([rank + 1.0]), torch.ones(1)

    total = mine.clone()
    dist.all_reduce(total)
    assert total.item() == 3, "all_reduce"

    parts = [torch.zeros(1), torch.zeros(1)]
    work = dist.all_gather(parts, mine, async_op=True)
    assert work is not None
    work.get_future().wait()
    work.wait()
    assert [part.item() for part in parts] == [1, 2], "all_gather, asynchronous, by its future"

    swapped = dist.new_group([1, 0], sort_ranks=False)
    assert dist.get_rank(swapped) == 1 - rank, "new_group, in the order that was given"
    dist.broadcast(one, src=1, group=swapped)

    everybody = dist.group.WORLD
    assert everybody is not None
    reduced = functional.all_reduce(mine, "sum", everybody)
    assert reduced.item() == 3, "a functional collective"

    came = torch.zeros(1)
    both = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, came, 1 - rank)]
    for each in dist.batch_isend_irecv(both):
        each.wait()
    assert came.item() == 2 - rank, "batch_isend_irecv"

    dist.destroy_process_group(swapped)
