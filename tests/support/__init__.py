"""Test helpers: shells that run commands, groups of ranks, small configurations, simulators, run directories."""
