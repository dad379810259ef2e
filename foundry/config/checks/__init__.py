"""Checks of a composed configuration across groups."""
