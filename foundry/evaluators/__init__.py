"""Evaluators: metrics of a model that every rank measures together during a run."""
