"""What each rank does by itself around a step, and all of them, or none, go on from: hooks, loads that
waited. A rank on which it failed says so, and the others do not wait for it in the step.
"""

from __future__ import annotations

from collections.abc import Callable

from smp_core.errors import VerdictError
from smp_core.topology import GroupKind
from smp_core.torch.execution import failures
from smp_core.torch.session import Session


def done(session: Session, action: Callable[[], None], when: str) -> None:
    """Run ``action`` on this rank, and agree with all ranks of the world that it went well.

    Raises what it raised, where it raised; elsewhere what the first rank that failed makes of it: an
    error of ours as such, a user's as StepAbortedError, which says ``when``. A replica without a batch
    (``model.join``) calls it, too.
    """
    runtime = session.runtime
    raised: Exception | None = None
    try:
        action()
    except VerdictError:
        raise  # on the whole world, and it has ended
    except Exception as error:
        raised = error
    told = None if raised is None else failures.failure_of(runtime, None, raised)
    answers = runtime.fabric.objects.allgather(told, runtime.group(GroupKind.WORLD))
    if raised is not None:
        raise raised
    for answer in answers:
        if answer is not None:
            raise failures.elsewhere(answer, when)
