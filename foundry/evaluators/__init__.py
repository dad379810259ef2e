"""Evaluators: metrics of a model during a run, computed by all ranks together."""
