"""Each part of a run, built from its group of the configuration."""
