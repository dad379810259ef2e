"""Checks of a whole run with an environment."""
