"""MLflow: the records of a run, the process that sends them, and those that wait for a server."""
