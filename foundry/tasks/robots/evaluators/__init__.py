"""Evaluation of policies in simulated episodes."""
