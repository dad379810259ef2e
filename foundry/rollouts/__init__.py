"""Rollouts: windows of completions that the model generates, scored."""
