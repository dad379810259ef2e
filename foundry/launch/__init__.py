"""Start of jobs and ranks on this machine and on Slurm, and records of how they ended."""
