"""Jobs on a Ray cluster: the launcher, the cluster, actors, and the processes of ranks."""
