"""Sharded checkpoints: written in the background, published once they are on disk, verified before they are read."""
