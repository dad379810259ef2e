"""Environments, which compute rewards for a model's answers; no module here imports torch."""
