"""SMP's replacements of functions of torch (API 1.1)."""
