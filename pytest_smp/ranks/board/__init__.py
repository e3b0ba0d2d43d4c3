"""The board: what real ranks write down before they communicate, and what follows from it.

On the rank, ``recorder`` turns calls into records and ``instrument`` calls it for everything that
goes through torch.distributed. In the controller, ``analysis`` reads the records of all ranks and
finds mismatches, deadlocks and leaks: the verdicts that `sim` has for free. How the bytes travel is
the executor's business.
"""

from pytest_smp.ranks.board.analysis import Board, Finding
from pytest_smp.ranks.board.recorder import BoardRecorder

__all__ = ["Board", "BoardRecorder", "Finding"]
