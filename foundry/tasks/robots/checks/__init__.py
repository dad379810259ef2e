"""Checks of a composed configuration of robots."""
