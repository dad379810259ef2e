"""Relative paths are resolved from the directory of the command's start, even if hydra.job.chdir changes it."""

import json
import subprocess
import sys

import pytest
import yaml
from support.tiny import TINY_LM
from support.warm import WarmShell

TEXT = ["data=text", "data.path=texts/*.txt", "data.vocab_size=300", "data.cache_dir=cache"]
WORDS = [*TINY_LM, *TEXT, "evaluation.write_samples=false", "tracking.plots=false"]
MOVED = "hydra.job.chdir=true"


@pytest.fixture
def warm(tmp_path, cache):
    (tmp_path / "texts").mkdir()
    for number in range(30):
        (tmp_path / "texts" / f"{number}.txt").write_text("the dog runs over the hill and back again\n" * 9)
    return WarmShell(tmp_path, cache)


def status(run_dir):
    return json.loads((run_dir / "status.json").read_text())


def names(folder):
    return {path.name for path in folder.iterdir()}


@pytest.mark.long
def test_chdir_run_resolves_paths_from_the_start_directory(warm):
    out, _ = warm.run(*WORDS, MOVED, "hydra.run.dir=runs/one", "tracking.mlflow=true")
    run_dir = warm.cwd / "runs" / "one"
    assert f"{run_dir}\n" in out
    uri = json.loads((run_dir / "mlflow.json").read_text())["uri"]
    assert uri == f"sqlite:///{warm.cwd / 'mlflow.db'}"
    assert {"texts", "cache", "runs"} <= names(warm.cwd)
    assert not {"cache", "texts", "mlflow.db", "mlruns", "runs"} & names(run_dir)
    data = yaml.safe_load((run_dir / "config.yaml").read_text())["data"]
    assert (data["path"], data["cache_dir"]) == (str(warm.cwd / "texts" / "*.txt"), str(warm.cwd / "cache"))
    more = ["tracking=none", "hparams.max_steps=6", "checkpoint.scheduler_on_resume=config"]
    warm.run(*WORDS, MOVED, "hydra.run.dir=runs/two", "checkpoint.resume=runs/one", *more)
    warm.run(*WORDS, MOVED, "hydra.run.dir=runs/three", "model.init_from=runs/one", *more)
    assert [status(warm.cwd / "runs" / name)["step"] for name in ("one", "two", "three")] == [5, 6, 6]


@pytest.mark.long
@pytest.mark.parametrize("launcher", ["sequential", pytest.param("local", marks=pytest.mark.long)])
def test_chdir_sweep_jobs_resolve_paths_from_the_start_directory(warm, launcher):
    overrides = ["tracking=none", f"hydra/launcher={launcher}", "hydra.sweep.dir=sweep", "hparams.seed=1,2"]
    warm.run("-m", *WORDS, MOVED, *overrides)
    assert names(warm.cwd) == {"texts", "cache", "sweep"}
    for number in (0, 1):
        assert status(warm.cwd / "sweep" / str(number))["state"] == "finished"
        assert not {"cache", "sweep"} & names(warm.cwd / "sweep" / str(number))
    finished = (warm.cwd / "sweep" / "0" / "result.json").stat().st_mtime_ns
    warm.run("-m", *WORDS, MOVED, *overrides)
    assert (warm.cwd / "sweep" / "0" / "result.json").stat().st_mtime_ns == finished


@pytest.mark.long
@pytest.mark.distributed
def test_chdir_run_of_two_processes_resolves_paths_from_the_start_directory(warm):
    overrides = ["tracking=none", "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=2"]
    warm.run(*WORDS, MOVED, *overrides, "hydra.run.dir=run")
    assert names(warm.cwd) == {"texts", "cache", "run"}


@pytest.mark.long
def test_chdir_plan_finds_plan_measured_from_the_start_directory(warm):
    warm.run(*WORDS, "tracking=none", "hydra.run.dir=run", "tracking.log_every_n_steps=1")
    warm.run(*WORDS, MOVED, "hydra.run.dir=plan", "plan.measured=run", module="foundry.plan")
    assert json.loads((warm.cwd / "plan" / "plan.json").read_text())["step_seconds"] > 0


def test_missing_option_that_is_in_a_conf_folder_hints_at_config_dir(warm):
    (warm.cwd / "conf" / "experiment").mkdir(parents=True)
    option = "# @package _global_\nhparams:\n  seed: 77\n"
    (warm.cwd / "conf" / "experiment" / "mine.yaml").write_text(option)
    _, err = warm.run(*WORDS, "experiment=mine", code=2)
    assert "there is conf/experiment/mine.yaml here: add --config-dir conf" in err
    assert err.count("\n") == 1
    warm.run("--config-dir", "conf", *WORDS, "experiment=mine", MOVED, "hydra.run.dir=run", "tracking=none")
    assert yaml.safe_load((warm.cwd / "run" / "config.yaml").read_text())["hparams"]["seed"] == 77


def test_version_is_printed_without_importing_torch(tmp_path):
    message = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "foundry", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert message.stdout.startswith("foundry ")
    assert all(name in message.stdout for name in ("Python 3", "torch 2", "hydra-core 1."))
    assert "| torch\n" not in message.stderr
