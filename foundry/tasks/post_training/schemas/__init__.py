"""Settings of the data, objectives and environments of post-training."""
