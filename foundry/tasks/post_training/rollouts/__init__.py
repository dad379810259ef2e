"""Rollouts: windows of scored completions that the model generates."""
