"""Schemas of robots, by config group; no module here imports torch."""
