"""What SMP offers in place of functions of torch (SMP_API.md 1.1)."""
