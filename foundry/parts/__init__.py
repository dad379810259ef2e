"""Builders of a run's parts, each from its group of the configuration."""
