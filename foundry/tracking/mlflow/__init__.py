"""MLflow tracker: records of a run, the process that sends them, and the records that wait for a server."""
