"""Checkpoints: saving and loading, the files, and the objects that they may hold."""

from smp_core.torch.checkpoint.save_and_resume import (
    load,
    resume_from_checkpoint,
    save,
    save_checkpoint,
)

__all__ = ["load", "resume_from_checkpoint", "save", "save_checkpoint"]
