"""Training: the order of events of a run, its step, evaluation and guards."""
