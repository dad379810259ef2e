"""Tasks: kinds of training with parts of their own, each in a folder that the rest of the package works without."""

BUILT_IN = {"post_training": "foundry.tasks.post_training:TASK", "robots": "foundry.tasks.robots:TASK"}
"""The tasks of this package by name; each is a `foundry.core.tasks.Task`. A task without its folder is left out."""
