"""Commands, one module each, and `compose` and `run` for scripts and notebooks."""
