"""Dataclass schemas of the configuration, one module or package for each config group."""
