"""Checkpoints: sharded, durable before they are published, verified before they are read, written in the background."""
