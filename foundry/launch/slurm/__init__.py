"""Jobs on a Slurm cluster: the launcher, queries of the queue, batch scripts, and the task of a job."""
