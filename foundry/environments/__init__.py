"""Environments, which score a model's answers; torch is not imported here."""
