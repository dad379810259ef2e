"""The plan of a run: its numbers and its memory, derived before it starts."""
