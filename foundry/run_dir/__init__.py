"""The small files of a run directory: what other processes, and other rooms, may read of a run."""
