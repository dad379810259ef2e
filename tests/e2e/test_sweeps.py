"""`python -m foundry -m`: sweeps with failing jobs, resumed sweeps, and refusal of a sweep as a whole."""

import json
import signal
from pathlib import Path

import pytest
from support.examples import long_case, some_of
from support.local_sweeps import TINY_JOB
from support.tiny import TINY_DIT
from support.warm import WarmShell
from support.wrong_sweeps import WRONG_SWEEPS, assert_said, write_options

TINY = [*TINY_DIT, "hparams.max_steps=3", "evaluation.interval=null", "tracking=none", "hydra.sweep.dir=sweep"]
DIVERGES = "1e30"


def read(path):
    return json.loads(path.read_text())


def states(sweep):
    return {
        job["index"]: read(sweep / job["dir"] / "status.json")["state"] for job in read(sweep / "sweep.json")["jobs"]
    }


@pytest.fixture(scope="module")
def begun(tmp_path_factory, cache):
    """A sweep whose second of three jobs failed, and its stdout and stderr; read-only."""
    shell = WarmShell(tmp_path_factory.mktemp("sweeps"), cache)
    message = shell.run("-m", *TINY, f"hparams.lr=1e-3,{DIVERGES},2e-3", code=1)
    return shell, shell.cwd / "sweep", *message


def test_failed_job_does_not_end_the_sweep(begun):
    _, sweep, stdout, stderr = begun
    assert states(sweep) == {0: "finished", 1: "failed", 2: "finished"}
    assert "NonFiniteError" in read(sweep / "1" / "status.json")["reason"]
    assert "Traceback" in (sweep / "1" / "foundry.log").read_text()
    (line,) = stderr.splitlines()
    assert line.startswith("job 1 (hparams.lr=1e+30): NonFiniteError: step 2")
    assert line.endswith("see sweep/1/foundry.log")
    assert "3 jobs: 2 finished, 1 failed" in stdout


def test_json_progress_of_a_sweep_is_the_only_stdout(tmp_path, cache):
    stdout, stderr = WarmShell(tmp_path, cache).run("-m", *TINY, "tracking.progress=json", "hparams.seed=0,1")
    events: dict[str, list[str]] = {}
    for line in stdout.splitlines():
        record = json.loads(line)
        events.setdefault(Path(record["run_dir"]).name, []).append(record["event"])
    assert events == {name: ["start", *["step"] * 3, "evaluation", "end"] for name in ("0", "1")}
    assert "2 jobs: 2 finished" in stderr


def test_sweep_manifest_describes_launcher_and_jobs(begun):
    _, sweep, *_ = begun
    manifest = read(sweep / "sweep.json")
    assert manifest["command"][0] == "-m"
    assert manifest["launcher"] == "sequential"
    for job in manifest["jobs"]:
        run_dir = sweep / job["dir"]
        assert read(run_dir / "status.json")["config_hash"] == job["config_hash"]
        assert job["overrides"][0].startswith("hparams.lr=")
    assert read(sweep / "0" / "result.json")["config_hash"] == manifest["jobs"][0]["config_hash"]


@pytest.mark.long
def test_resumed_sweep_refuses_changed_settings_of_a_job(begun):
    shell, sweep, *_ = begun
    before = {path: path.stat().st_mtime_ns for path in sweep.rglob("*")}
    _, stderr = shell.run("-m", *TINY, "hparams.lr=1e-3,2e-3", "hparams.grad_clip_norm=0.5", code=2)
    (line,) = stderr.splitlines()
    assert line.startswith("hydra.sweep.dir: sweep contains this sweep with hparams.grad_clip_norm: 1 -> 0.5 in job 0")
    _, stderr = shell.run("-m", *TINY, "hparams.lr=1e-3,2e-3", "hydra/launcher=basic", code=2)
    assert stderr.startswith("hydra/launcher: is basic, which cannot resume a sweep")
    assert {path: path.stat().st_mtime_ns for path in sweep.rglob("*")} == before


@pytest.mark.long
def test_repeated_sweep_command_runs_only_unfinished_jobs(shell):
    sweep = shell.cwd / "sweep"
    shell.run("-m", *TINY, f"hparams.lr=1e-3,{DIVERGES}", code=1)
    finished = (sweep / "0" / "result.json").stat().st_mtime_ns
    stdout, _ = shell.run(*TINY, "-m", f"hparams.lr=5e-4,{DIVERGES},1e-3", code=1)  # -m may stand anywhere
    assert states(sweep) == {0: "finished", 1: "failed", 2: "finished"}
    assert read(sweep / "sweep.json")["jobs"][2]["overrides"] == ["hparams.lr=0.0005"]
    assert (sweep / "0" / "result.json").stat().st_mtime_ns == finished
    assert "1 of 3 jobs have already finished" in stdout
    shell.run("-m", *TINY, "hparams.lr=5e-4,1e-3")
    assert len(states(sweep)) == 3, "jobs of an earlier start are missing in the table"


@pytest.mark.long
def test_ctrl_c_checkpoints_the_running_job_and_leaves_the_rest_queued(shell):
    sweep, overrides = shell.cwd / "sweep", [*TINY, "hparams.max_steps=120", "hparams.seed=1,2"]
    process = shell.start("-m", *overrides)
    for line in process.stdout:
        if line.split()[:2] == ["step", "3/120"]:
            process.send_signal(signal.SIGINT)
            break
    _, stderr = process.communicate(timeout=240)
    assert process.returncode == 130
    assert "Traceback" not in stderr
    assert "the same command with hydra.sweep.dir=sweep resumes from there" in stderr
    assert states(sweep) == {0: "stopped", 1: "queued"}
    stopped = read(sweep / "0" / "status.json")["step"]
    shell.run("-m", *overrides)
    assert states(sweep) == {0: "finished", 1: "finished"}
    steps = [json.loads(line)["step"] for line in (sweep / "0" / "metrics.jsonl").read_text().splitlines()]
    assert steps.count(stopped - 1) == 1, "a job continues from its checkpoint"


@pytest.mark.long
def test_killed_sweep_resumes_bit_identical_to_an_uninterrupted_sweep(monkeypatch, capsys):
    """A small language model starts faster than the diffusion model of the benchmark."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import sweeps

    monkeypatch.setattr(sweeps, "RUN", [*TINY_JOB, "tracking=none", "hparams.max_steps=100"])
    sweeps.kills(jobs=6, number=1)
    output = capsys.readouterr().out
    assert output.startswith("6 jobs, 1 kills of their sweep; ")
    assert output.endswith("all bit-identical to an undisturbed sweep's\n")


@pytest.mark.long
def test_mlflow_nests_job_runs_under_one_run_of_the_sweep(shell):
    from mlflow import MlflowClient

    overrides = [word for word in TINY if word != "tracking=none"]
    shell.run("-m", *overrides, "tracking.plots=false", "tracking.mlflow=true", f"hparams.lr=1e-3,{DIVERGES}", code=1)
    for pending in (shell.cwd / "sweep").glob("*/mlflow_pending.jsonl"):  # there are some on a slow machine
        shell.run(f"dir={pending.parent}", module="foundry.sync")
    client = MlflowClient(f"sqlite:///{shell.cwd}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("foundry").experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    assert (parent.info.run_name, parent.info.status) == ("sweep", "FAILED")
    jobs = {run.data.tags["sweep_job"]: run for run in runs if run is not parent}
    assert {run.data.tags["mlflow.parentRunId"] for run in jobs.values()} == {parent.info.run_id}
    assert (jobs["0"].info.status, jobs["0"].data.tags["overrides"]) == ("FINISHED", "hparams.lr=0.001")
    assert jobs["1"].info.status == "FAILED"


@pytest.mark.parametrize("launcher", ["sequential", pytest.param("local", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", some_of(WRONG_SWEEPS, "grid"))
def test_sweep_with_an_invalid_job_starts_no_job(run_command, launcher, name):
    write_options(run_command.cwd)
    before = set(run_command.cwd.rglob("*"))
    stdout, stderr = run_command("-m", *WRONG_SWEEPS[name][0], f"hydra/launcher={launcher}", code=2)
    assert_said(name, stderr)
    assert stdout == ""
    assert set(run_command.cwd.rglob("*")) == before


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["hparams.global_batch_size=8,24", "hparams.per_gpu_batch_size=4", "distributed.nproc_per_node=1,2,3"],
            ["job 2 (hparams.global_batch_size=8, distributed.nproc_per_node=3)"],
        ),
        (["optimizer=glob(zzz*)"], ["optimizer: is glob(zzz*), which gives no value"]),
        long_case(["experiment=digits_epsilon,none_such"], ["job 1 (experiment=none_such): experiment: has no option"]),
        (
            ["hparams.lr=1,2,3", "hparams.seed=1,2", "hydra.sweeper.zip=[[hparams.lr,hparams.seed]]"],
            ["hparams.seed has 2"],
        ),
        long_case(
            ["hparams.lr=1,2", "hydra.sweeper.zip=[hparams.lr]"],
            ["hydra.sweeper.zip: has hparams.lr, which is not a list of at least two keys"],
        ),
        long_case(["hparams.lr=1,2", "hydra.sweeper.exclude=[hparams.lr=3]"], ["hydra.sweeper.exclude"]),
        long_case(["hparams.lr=1,2", "hydra.sweeper.max_batch_size=0"], ["must be at least 1"]),
        long_case(["hparams.lr=1,2", "hydra.sweep.subdir=same"], ["hydra.sweep.subdir: gives job 1 (hparams.lr=2)"]),
        long_case(["hparams.lr=1,2", "hydra.sweeper.zippp=[]"], ["hydra.sweeper.zippp"]),
    ],
)
def test_invalid_sweep_options_are_refused_without_files(run_command, overrides, message):
    _, stderr = run_command("-m", *overrides, code=2)
    assert [part in line for part, line in zip(message, stderr.splitlines(), strict=True)] == [True] * len(message)
    assert list(run_command.cwd.iterdir()) == []


@pytest.mark.long
def test_lr_range_search_runs_without_checkpoints(shell):
    overrides = [word for word in TINY_DIT if word != "debug=fast"]
    overrides += ["hparams_search=lr_range", "hparams.max_steps=2", "evaluation.max_samples=16", "tracking=none"]
    shell.run(*overrides, "hparams.lr=1e-4,1e-3", "hydra.sweep.dir=sweep")
    assert states(shell.cwd / "sweep") == {0: "finished", 1: "finished"}
    assert not (shell.cwd / "sweep" / "0" / "checkpoints").exists()
