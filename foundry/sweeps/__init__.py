"""Sweeps: from swept overrides to composed jobs and the report of their results."""
