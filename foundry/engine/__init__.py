"""A run: building its parts, starting and restoring weights, training, and the files of its directory."""
