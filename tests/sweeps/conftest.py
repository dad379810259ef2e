from run_events import empty_database, events, no_mlflow_of_the_user, with_database  # noqa: F401 # fixtures
