"""Copy of a run directory in a store that fsspec can reach: its layout, writing and reading."""
