"""The task `waves`: predict the next value of a sine wave from the values before it."""

from pathlib import Path

from foundry.core.tasks import Plot, Task, TaskEvaluation

TASK = Task(
    name="waves",
    schemas={"data": ("waves.schemas",), "model": ("waves.model_schema",), "objective": ("waves.objective_schema",)},
    checks=("waves.schemas:check_window",),
    resolvers={"waves_period": "waves.schemas:period_of"},
    run_files={"scale.json": "waves.data:Scale"},
    plots={"error": Plot(draw="waves.plot:error_figure", metrics=("val_error",))},
    pictures=("error.png",),
    evaluation=TaskEvaluation(
        measure="waves.evaluation:measure",
        options="waves.schemas:WaveOptions",
        file="scale.json",
        described="of waves",
    ),
    config_dir=Path(__file__).with_name("conf"),
)
