"""The small files of a run directory, which other processes and rooms read and write through this room only."""
