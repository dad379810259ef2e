"""Schemas of robots, by group; torch-free."""
