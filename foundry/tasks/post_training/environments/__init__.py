"""Environments, which score a model's answers, and the judge, which computes rewards; no module here imports torch."""
