"""MLflow: what is sent, by which process, and what waits where no server answers."""
