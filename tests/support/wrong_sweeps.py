"""Sweeps with invalid jobs, and the expected beginnings of their error lines."""

EXPERIMENT = "# @package _global_\nhparams:\n  lr: {lr}\noptimizer:\n  weight_decay: {weight_decay}\n"
SEARCH = """\
# @package _global_
hydra:
  mode: MULTIRUN
  sweeper:
    params:
      hparams.lr: 1e-3,2e-3,-1,4e-3
      hparams.seed: range(3)
"""
RATES = "hparams.lr=" + ",".join("-1" if number == 7 else f"{number + 1}e-3" for number in range(12))

WRONG_SWEEPS = {
    "grid": ([RATES], ["job 7 (hparams.lr=-1): hparams.lr: "]),
    "max_batch_size": (
        [RATES, "hydra.sweeper.max_batch_size=1"],
        ["job 7 (hparams.lr=-1): hparams.lr: "],
    ),
    "zip": (
        [RATES, "hparams.seed=range(12)", "hydra.sweeper.zip=[[hparams.lr,hparams.seed]]"],
        ["job 7 (hparams.lr=-1, hparams.seed=7): hparams.lr: "],
    ),
    "experiment": (
        ["--config-dir=own", "experiment=one,two,broken", "hparams.seed=range(4)"],
        [
            "hparams.lr: is -0.5 but must be above 0 (4 of 12 jobs: 8, 9, 10, …; the ",
            "optimizer.weight_decay: is -0.1 ",
        ],
    ),
    "combination": (
        ["hparams.global_batch_size=8,12,24", "hparams.per_gpu_batch_size=1,2,4,8"],
        ["job 7 (hparams.global_batch_size=12, hparams.per_gpu_batch_size=8): hparams.global_batch_size: "],
    ),
    "options": (
        ["scheduler=wsd,linear", "scheduler.decay_style=cosine", "hparams.seed=range(6)"],
        ["scheduler.decay_style: is not a setting of "],
    ),
    "search": (
        ["--config-dir=own", "hparams_search=mine"],
        ["hparams.lr: is -1 but must be above 0 (3 of 12 jobs: 6, 7, 8; the first, job 6: hparams.lr=-1, "],
    ),
}
"""Overrides and expected beginnings of error lines, by name."""


def write_options(folder):
    """Write the user options that some sweeps choose into `folder`/own."""
    for name, lr, weight_decay in (("one", 0.001, 0.0), ("two", 0.002, 0.1), ("broken", -0.5, -0.1)):
        path = folder / "own" / "experiment" / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(EXPERIMENT.format(lr=lr, weight_decay=weight_decay))
    path = folder / "own" / "hparams_search" / "mine.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(SEARCH)


def assert_said(name, stderr):
    """Assert that stderr has exactly the expected error lines, each with the affected jobs."""
    lines, expected = stderr.splitlines(), WRONG_SWEEPS[name][1]
    assert [line[: len(beginning)] for line, beginning in zip(lines, expected, strict=False)] == expected, stderr
    assert len(lines) == len(expected), stderr
