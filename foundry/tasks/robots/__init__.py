"""Robots: policies trained on demonstrations and recorded episodes, and evaluated in simulators."""

from foundry.core.tasks import EVALUATORS, Plot, Task, TaskEvaluation
from foundry.tasks.robots.names import STATISTICS, SUCCESS_METRICS

_HERE = "foundry.tasks.robots"

TASK = Task(
    name="robots",
    schemas={
        "data": (f"{_HERE}.schemas.data",),
        "model": (f"{_HERE}.schemas.model",),
        "objective": (f"{_HERE}.schemas.objective",),
        "simulator": (f"{_HERE}.schemas.simulator",),
        EVALUATORS: (f"{_HERE}.schemas.evaluators",),
    },
    checks=(
        f"{_HERE}.checks.episodes:check_episodes",
        f"{_HERE}.checks.policies:check_policies",
        f"{_HERE}.checks.scenes:check_scenes",
        f"{_HERE}.checks.success:check_success",
    ),
    resolvers={
        "lerobot_size": f"{_HERE}.resolvers:lerobot_size",
        "seen_size": f"{_HERE}.resolvers:seen_size",
        "simulator_size": f"{_HERE}.resolvers:simulator_size",
        "tabletop_state_dim": f"{_HERE}.resolvers:tabletop_state_dim",
    },
    implies=f"{_HERE}.implied_options:implied_options",
    run_files={STATISTICS: f"{_HERE}.data.statistics:Statistics"},
    plots={
        "success": Plot(
            draw=f"{_HERE}.success_figure:success_figure",
            metrics=tuple(f"val_{name}" for name in SUCCESS_METRICS[:3]),
        )
    },
    pictures=("success.png", "rollouts.gif"),
    forward_methods=("observe",),
    evaluation=TaskEvaluation(
        measure=f"{_HERE}.command:measure",
        options=f"{_HERE}.command:PolicyOptions",
        file=STATISTICS,
        groups=("simulator",),
        described="of policies in a simulator",
    ),
    options={
        "data": ("demonstrations", "lerobot", "scenes"),
        "evaluation": ("success",),
        "experiment": ("around_images", "fetch_push", "metaworld_pick_place", "vla_touch", "vlm_scenes"),
        "hparams": ("policy", "vla"),
        "model": ("policy_dit", "vla"),
        "objective": ("action_regression", "diffusion_policy", "flow_policy"),
        "simulator": (
            "around",
            "fetch_pick_and_place",
            "fetch_push",
            "gymnasium",
            "metaworld",
            "push",
            "touch",
        ),
    },
)
