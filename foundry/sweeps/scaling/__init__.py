"""Scaling laws: fits of the held-out loss of a sweep's jobs over parameters and tokens, for `foundry scaling`."""
