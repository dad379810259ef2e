"""`from foundry import compose, run` in a script or notebook: results, errors, and unchanged process state."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from support import composition
from support.tiny import TINY_DIT

from foundry import ConfigError, Stopped, compose, run
from foundry.config.composition.hydra_versions import IS_1_3

QUIET = [*TINY_DIT, "hparams.max_steps=2", "tracking=none", "checkpoint=none", "evaluation.write_samples=false"]


class Recorder:
    """An observer that records the names of events, also in the file `path` if it is given."""

    def __init__(self, path=None, fail_on=None, kill_on=None):
        self.path, self.fail_on, self.kill_on, self.events = path, fail_on, kill_on, []
        self.is_deterministic = None

    def _note(self, name, event):
        self.events.append(name)
        if self.path is not None:
            self.path.write_text(json.dumps([os.getpid(), self.events]))
        if name == self.fail_on:
            raise LookupError(name)
        if name == self.kill_on:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_start(self, event):
        self.is_deterministic = torch.are_deterministic_algorithms_enabled()
        self._note("start", event)

    def on_step(self, event):
        self._note("step", event)

    def on_evaluation(self, event):
        self._note("evaluation", event)

    def on_end(self, event):
        self._note(event.state, event)


def process_state():
    """Return the process-wide state that a run must not change."""
    return (
        os.getcwd(),  # noqa: PTH109
        list(sys.argv),
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)],
        list(logging.getLogger().handlers),
        logging.getLogger().level,
        GlobalHydra.instance().hydra,
        VersionBase.instance().version_base,
        torch.are_deterministic_algorithms_enabled(),
    )


def test_import_foundry_does_not_import_torch_or_hydra():
    code = "import foundry, sys; sys.exit(bool({'torch', 'hydra', 'omegaconf'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_library_compose_equals_the_command_line():
    assert compose(QUIET) == composition.configure(*QUIET)


def test_library_compose_reports_all_config_errors_together():
    with pytest.raises(ConfigError) as refused:
        compose(
            [
                "hparams.lrr=1",
                "scheduler=wsdd",
                "hparams.global_batch_size=10",
                "hydra.run.dir=x",
                "hydra/launcher=slurm",
            ]
        )
    keys = {violation.key for violation in refused.value.violations}
    assert keys == {"hparams.lrr", "scheduler", "hparams.global_batch_size", "hydra.run.dir", "hydra/launcher"}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [(["hparams_search=lr_range"], "hydra.mode"), (["hparams.lr=1,2"], "hparams.lr"), ("hparams.lr=1", "overrides")],
)
def test_library_compose_rejects_sweeps_and_a_plain_string(overrides, key):
    with pytest.raises(ConfigError) as refused:
        compose(overrides)
    assert [violation.key for violation in refused.value.violations] == [key]


def test_library_compose_accepts_a_folder_of_user_options(tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer/mine.yaml").write_text("defaults: [adamw]\nweight_decay: 0.25\n")
    assert compose([*QUIET, "optimizer=mine"], config_dir=tmp_path).optimizer.weight_decay == 0.25
    with pytest.raises(ConfigError, match=r"config_dir: is .*, which is not a folder"):
        compose(config_dir=tmp_path / "missing")
    with pytest.raises(ConfigError, match="optimizer: has no option 'mine'"):
        compose([*QUIET, "optimizer=mine"])


def test_repeated_library_runs_keep_the_process_state_and_hydra_usable(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/app.yaml").write_text("answer: 42\n")
    with initialize_config_dir(str(tmp_path / "conf"), **({"version_base": "1.2"} if IS_1_3 else {})):
        before, recorder, other = process_state(), Recorder(), Recorder()
        first = run(compose(QUIET), observers=[recorder])
        with pytest.raises(ConfigError):
            compose(["hparams.lrr=1"])
        assert hydra_compose("app").answer == 42
        words = ["hparams.max_steps=1", "hparams.deterministic=true"]
        second = run(compose([*QUIET, *words]), observers=[other])
        assert process_state() == before
    assert first.run_dir.parent == second.run_dir.parent == tmp_path / "runs"
    assert first.run_dir != second.run_dir
    assert [json.loads((each.run_dir / "result.json").read_text())["step"] for each in (first, second)] == [2, 1]
    assert (recorder.is_deterministic, other.is_deterministic) == (False, True)
    assert first.metric == first.result["val_loss"]
    assert recorder.events == ["start", "step", "evaluation", "step", "evaluation", "finished"]


def test_exception_in_an_observer_fails_the_run(tmp_path):
    before = process_state()
    with pytest.raises(LookupError, match="step"):
        run(compose(QUIET), tmp_path / "run", observers=[Recorder(fail_on="step")])
    assert process_state() == before
    assert json.loads((tmp_path / "run/status.json").read_text())["state"] == "failed"
    assert "LookupError: step" in (tmp_path / "run/foundry.log").read_text()


def test_sigterm_saves_a_checkpoint_and_the_same_call_resumes(tmp_path):
    config, before = compose([*QUIET, "checkpoint=default"]), process_state()
    with pytest.raises(Stopped) as stopped:
        run(config, tmp_path / "run", observers=[Recorder(kill_on="step")])
    assert process_state() == before
    assert (stopped.value.step, stopped.value.code) == (1, 128 + signal.SIGTERM)
    assert run(config, tmp_path / "run").result["step"] == 2


def test_run_rejects_a_directory_with_foreign_files(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"run_dir: is .*, which contains files that are not foundry's"):
        run(compose(QUIET), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_run_rejected_by_the_machine_leaves_no_files(tmp_path):
    with pytest.raises(ConfigError, match=r"distributed\.backend: is nccl"):
        run(compose([*QUIET, "distributed.backend=nccl"]), tmp_path / "a/run")
    assert list(tmp_path.iterdir()) == []


def test_run_in_another_thread_supports_a_single_process_only(tmp_path):
    assert threading.current_thread() is threading.main_thread()
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(run, compose(QUIET), tmp_path / "run").result().result["step"] == 2
        several = compose([*QUIET, "distributed=ddp", "distributed.nproc_per_node=2", "hparams.global_batch_size=32"])
        with pytest.raises(ConfigError, match=r"distributed\.nproc_per_node: is 2 but only the main thread"):
            pool.submit(run, several, tmp_path / "several").result()
    assert not (tmp_path / "several").exists()


@pytest.mark.long
@pytest.mark.distributed
def test_library_run_starts_several_processes(tmp_path):
    config, before = (
        compose([*QUIET, "distributed=ddp", "distributed.nproc_per_node=2", "hparams.global_batch_size=32"]),
        process_state(),
    )
    done = run(config, tmp_path / "run", observers=[Recorder(tmp_path / "events.json")])
    assert process_state() == before
    assert json.loads((tmp_path / "run/plan.json").read_text())["world_size"] == 2
    process, events = json.loads((tmp_path / "events.json").read_text())
    assert process != os.getpid()
    assert events[-1] == "finished"
    assert done.result["step"] == 2
