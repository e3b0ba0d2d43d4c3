"""The state of the process that torch.distributed writes, with what `sim` does about each."""
