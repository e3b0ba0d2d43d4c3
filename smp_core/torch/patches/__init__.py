"""What SMP offers in place of functions of torch (API 1.1)."""
