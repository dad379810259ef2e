"""Sweeps: from overrides that vary to composed jobs, to what came of them."""
