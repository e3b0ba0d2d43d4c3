"""Messages between the ranks of a pipeline: small, large, and seen before they are waited for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from smp_core.torch import session as sessions
from smp_core.torch.execution.remote.messages import Returned
from smp_core.torch.execution.remote.packets import freeze
from smp_core.torch.execution.remote.transport import ENVELOPE, Transport


@pytest.mark.smp(ranks=2, pipeline_parallel_degree=2)
@pytest.mark.parametrize("size", [0, 1, ENVELOPE, 3 * ENVELOPE])
def test_a_message_that_has_come_is_seen(smp: Any, size: int) -> None:
    """Also where torch's Work says that it is complete only after ``wait``, as Gloo's do."""
    transport = Transport(sessions.current("a test").runtime)
    other = 1 - transport.rank
    for number in range(3):
        payload = freeze(torch.arange(size, dtype=torch.uint8), "a test", False)
        if transport.rank == 0:
            assert not transport.arrived()
            transport.expect()
            transport.send(other, Returned(0, number), payload, 0)
            while not transport.arrived():  # ends with the test's time, if never
                pass
            sender, message, received = transport.receive()
        else:
            sender, message, received = transport.receive()
            transport.send(other, message, payload, 0)
        assert (sender, message) == (other, Returned(0, number))
        assert torch.equal(received.thaw(), torch.arange(size, dtype=torch.uint8))
        # Counted once each, though what was sent before has not been waited for.
        assert transport.messages == (number + 1) * (1 if size < ENVELOPE else 2)
    transport.settle()
