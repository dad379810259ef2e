"""Launching: processes and ranks on this machine and on Slurm, and how they ended."""
