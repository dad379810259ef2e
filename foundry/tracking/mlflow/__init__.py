"""MLflow: what is sent, from which thread, and what waits where no server answers."""
