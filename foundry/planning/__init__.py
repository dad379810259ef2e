"""Plan of a run: its steps, schedule and memory, derived before the run starts."""
