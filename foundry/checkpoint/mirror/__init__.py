"""Threads that copy a run directory into a store while the run trains, one on each rank."""
