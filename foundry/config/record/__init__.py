"""The configuration as it is recorded: written, hashed, read back without trust, compared on resume."""
