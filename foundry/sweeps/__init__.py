"""Sweeps: from words that vary to composed jobs, to what came of them."""
