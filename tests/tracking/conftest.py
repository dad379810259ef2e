from support.run_events import (  # noqa: F401 # fixtures
    black_hole,
    empty_database,
    events,
    mlflow_server,
    no_mlflow_of_the_user,
    own_server,
    with_database,
)
