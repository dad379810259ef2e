"""Submissions whose command is killed or gets no answer: the next one finds the jobs and submits none twice."""

import os
import signal
import subprocess
import time

import pytest
from omegaconf import OmegaConf
from submitit.core.utils import DelayedSubmission, JobPaths

from foundry.config.schemas.launcher import Slurm
from foundry.core.errors import ConfigError
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_queue import JobQueue
from foundry.launch.job_state import Unreachable
from foundry.launch.slurm import open_submission
from foundry.launch.slurm.end import Submission
from foundry.launch.slurm.launcher import SlurmLauncher
from foundry.launch.slurm.open_submission import OpenSubmission
from foundry.launch.slurm.queue import is_submitting
from foundry.run_dir.names import OPEN_SUBMISSION, SUBMISSION

ACCEPT = 'echo "31 $2" >> queue'
SCONTROL = """
case "$*" in
    *config) echo 'ClusterName             = lab' ;;
    *partition) echo 'PartitionName=main Default=YES MaxTime=UNLIMITED' ;;
    *job*) grep -q . queue && cat jobs || { echo 'Invalid job id specified' >&2; exit 1; } ;;
esac
"""
ARRAY = "JobId=31 ArrayJobId=31 ArrayTaskId=0-1%2 JobState={state} Reason=None\n"
SINGLE = "JobId=31 JobState={state} Reason=None\n"


class FakeSlurm:
    """Shell scripts in place of Slurm's commands; file `queue` has the id and the script of each accepted job."""

    def __init__(self, folder):
        self.folder = folder
        self.queue = folder / "queue"
        self.queue.touch()
        self.write("srun", "true")
        self.write("scontrol", SCONTROL)
        self.write("squeue", "cat queue")
        self.write("sacct", "exit 1")
        self.write("sbatch", f"{ACCEPT}; echo 31")
        self.report_jobs(ARRAY.format(state="PENDING"))

    def write(self, name, script):
        path = self.folder / name
        path.write_text(f"#!/bin/sh\ncd {self.folder}\n{script}\n")
        path.chmod(0o755)

    def report_jobs(self, text):
        (self.folder / "jobs").write_text(text)

    @property
    def num_submissions(self):
        return len(self.queue.read_text().splitlines())


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr("foundry.launch.slurm.queue._SECOND_LOOK_SECONDS", 0.01)
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return FakeSlurm(folder)


@pytest.fixture
def sweep(tmp_path, slurm):
    """A function that returns a launcher, as a new command has it, and the jobs of the sweep."""

    def start(num_jobs=2, submitit_folder="%j", **settings):
        folder = tmp_path / "sweep"
        launcher_settings = Slurm(submitit_folder=str(folder / ".submitit" / submitit_folder), name="night", **settings)
        hydra = {"launcher": OmegaConf.structured(launcher_settings), "sweep": {"dir": str(folder)}}
        hydra["job"] = {"name": "foundry"}
        config = OmegaConf.create({"hydra": hydra})
        jobs = [
            ComposedJob(index=index, overrides=(), label="", run_dir=folder / str(index), config=config)
            for index in range(num_jobs)
        ]
        for job in jobs:
            job.run_dir.mkdir(parents=True, exist_ok=True)
        launcher = SlurmLauncher(os.fspath)
        launcher.poll_seconds = (0.01, 0.01)
        launcher.setup(hydra_context=None, task_function=None, config=config)
        return launcher, jobs

    return start


def submit_in_killed_process(sweep, *arguments, sbatch_ends=True):
    """Submit the jobs in a process that `sbatch` kills, and wait for the end of `sbatch` if it ends by itself."""
    if (process := os.fork()) == 0:
        try:
            launcher, jobs = sweep(*arguments)
            launcher.submit(jobs)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    scripts = list(sweep(*arguments)[1][0].run_dir.parent.rglob("*.sh"))
    assert scripts
    while sbatch_ends and any(map(is_submitting, scripts)):
        time.sleep(0.001)


def assert_submitted(jobs, ids):
    """Assert that the jobs are recorded as `ids`, and that submitit finds its files."""
    folder = jobs[0].config.hydra.launcher.submitit_folder
    for job, job_id in zip(jobs, ids, strict=True):
        paths = JobPaths(folder, job_id=job_id)
        assert Submission.load(job.run_dir) == Submission(job_id=job_id, error_output=str(paths.stderr), cluster="lab")
        call = DelayedSubmission.load(paths.submitted_pickle)
        assert call.args == (str(job.run_dir),)
        assert (call._timeout_min, call._timeout_countdown) == (60, 100)
    assert not (jobs[0].run_dir.parent / OPEN_SUBMISSION).exists()
    assert JobPaths(folder, job_id="31").submission_file.is_file()


@pytest.mark.parametrize(("num_jobs", "ids"), [(1, ["31"]), (2, ["31_0", "31_1"])])
def test_submission_records_ids_and_moves_the_files_of_submitit(sweep, slurm, num_jobs, ids):
    launcher, jobs = sweep(num_jobs)
    assert launcher.submit(jobs) == dict(enumerate(ids))
    assert_submitted(jobs, ids)
    assert slurm.num_submissions == 1


def test_last_output_of_a_job_is_found_in_its_only_output_file(sweep, slurm):
    launcher, jobs = sweep(stderr_to_stdout=True)
    launcher.submit(jobs)
    paths = JobPaths(jobs[0].config.hydra.launcher.submitit_folder, job_id="31_0")
    paths.stdout.write_text("no space left\n")
    assert launcher.logs("31_0") == "no space left"


@pytest.mark.parametrize("command", ["submit", "check"])
def test_array_that_is_too_large_is_refused_with_a_remedy(sweep, slurm, command):
    error = "sbatch: error: Batch job submission failed: Invalid job array specification"
    slurm.write("sbatch", f"echo '{error}' >&2; exit 1")
    launcher, jobs = sweep()
    with pytest.raises(ConfigError, match=r"MaxArraySize\): lower hydra.sweeper.max_batch_size"):
        launcher.submit(jobs) if command == "submit" else launcher.check([job.config for job in jobs])


@pytest.mark.parametrize(("num_jobs", "ids", "text"), [(1, ["31"], SINGLE), (2, ["31_0", "31_1"], ARRAY)])
def test_jobs_of_a_command_that_was_killed_in_sbatch_are_found(sweep, slurm, num_jobs, ids, text):
    slurm.report_jobs(text.format(state="PENDING"))
    slurm.write("sbatch", f"{ACCEPT}; kill -9 $PPID")
    submit_in_killed_process(sweep, num_jobs)
    launcher, jobs = sweep(num_jobs)
    assert not (jobs[0].run_dir / SUBMISSION).exists()
    assert launcher.attach(jobs) == dict(enumerate(ids))
    assert_submitted(jobs, ids)
    assert slurm.num_submissions == 1


@pytest.mark.parametrize("folder", ["%j", "%A/it's %j", "all"])
@pytest.mark.parametrize("has_array", [False, True])
def test_jobs_that_start_before_the_killed_command_is_repeated_run_and_are_attached(sweep, slurm, folder, has_array):
    """Each job finds its own file, also when it is requeued, and the next command submits none again."""
    ids, text = (["31_0", "31_1"], ARRAY) if has_array else (["31"], SINGLE)
    slurm.report_jobs(text.format(state="RUNNING"))
    slurm.write("sbatch", f"{ACCEPT}; kill -9 $PPID")
    submit_in_killed_process(sweep, len(ids), folder)
    launcher, jobs = sweep(len(ids), folder)
    script = slurm.queue.read_text().removeprefix("31 ").strip()
    for number, (job, job_id) in enumerate(zip(jobs, ids, strict=True)):
        array = {"SLURM_ARRAY_JOB_ID": "31", "SLURM_ARRAY_TASK_ID": str(number)} if has_array else {}
        for _attempt in range(2):
            subprocess.run(["bash", script], env={**os.environ, "SLURM_JOB_ID": str(31 + number), **array}, check=True)
            paths = JobPaths(job.config.hydra.launcher.submitit_folder, job_id=job_id)
            assert DelayedSubmission.load(paths.submitted_pickle).args == (str(job.run_dir),)
    assert launcher.attach(jobs) == dict(enumerate(ids))
    assert_submitted(jobs, ids)
    assert slurm.num_submissions == 1


def test_jobs_of_a_killed_command_are_found_by_a_command_with_some_of_them(sweep, slurm):
    slurm.write("sbatch", f"{ACCEPT}; kill -9 $PPID")
    submit_in_killed_process(sweep)
    launcher, jobs = sweep()
    assert launcher.attach(jobs[1:]) == {1: "31_1"}
    assert launcher.attach(jobs[:1]) == {0: "31_0"}


def test_jobs_that_slurm_has_not_received_are_submitted_when_they_cannot_arrive_any_more(sweep, slurm, monkeypatch):
    slurm.write("sbatch", "kill -9 $PPID")
    submit_in_killed_process(sweep)
    launcher, jobs = sweep()
    with pytest.raises(Unreachable, match=r"sbatch gave no answer, so its jobs may appear in the queue within \d+ s"):
        launcher.attach(jobs)
    monkeypatch.setattr(open_submission, "_ARRIVAL_SECONDS", 0.0)
    assert launcher.attach(jobs) == {}
    assert [path.name for path in (jobs[0].run_dir.parent / ".submitit").iterdir()] == []
    slurm.write("sbatch", f"{ACCEPT}; echo 31")
    assert launcher.submit(jobs) == {0: "31_0", 1: "31_1"}
    assert_submitted(jobs, ["31_0", "31_1"])
    assert slurm.num_submissions == 1


def test_sbatch_that_outlives_its_command_is_awaited(sweep, slurm, monkeypatch):
    monkeypatch.setattr(open_submission, "_ARRIVAL_SECONDS", 0.0)
    slurm.write("sbatch", f"kill -9 $PPID; until [ -e go ]; do sleep 0.01; done; {ACCEPT}")
    submit_in_killed_process(sweep, sbatch_ends=False)
    launcher, jobs = sweep()
    with pytest.raises(Unreachable, match="sbatch of an earlier command still submits"):
        launcher.attach(jobs)
    (slurm.folder / "go").touch()
    deadline = time.monotonic() + 60
    while slurm.num_submissions == 0:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert launcher.attach(jobs) == {0: "31_0", 1: "31_1"}
    assert slurm.num_submissions == 1


@pytest.mark.parametrize(
    "end",
    [
        "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1",
        "echo 'sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received' >&2; exit 1",
        "echo 'Submission complete'",
        "exec sleep 60",
    ],
)
def test_jobs_that_slurm_accepts_without_an_answer_are_submitted_once(sweep, slurm, end, monkeypatch, capsys):
    monkeypatch.setattr("foundry.launch.slurm.queue._TIMEOUT_SECONDS", 1.0)
    slurm.write("sbatch", f"{ACCEPT}; {end}")
    launcher, jobs = sweep(detach=True)
    monkeypatch.setattr(launcher, "prepare", lambda job: None)
    launcher.start(jobs)
    assert slurm.num_submissions == 1
    output = capsys.readouterr().out
    assert output.count("Slurm does not respond, the wait continues: ") == 1
    assert "2 jobs left in the queue: 31\n" in output
    assert_submitted(jobs, ["31_0", "31_1"])


def test_time_of_arrival_counts_from_the_end_of_sbatch(sweep, slurm, monkeypatch):
    monkeypatch.setattr("foundry.launch.slurm.queue._TIMEOUT_SECONDS", 0.5)
    slurm.write("sbatch", "exec sleep 60")
    launcher, jobs = sweep()
    start = time.time()
    with pytest.raises(Unreachable, match=r"sbatch takes more than 0\.5 s"):
        launcher.submit(jobs)
    assert OpenSubmission.load(jobs[0].run_dir.parent).last_seen >= start + 0.5


def test_unanswered_lookup_is_no_reason_to_submit(sweep, slurm, monkeypatch):
    monkeypatch.setattr(open_submission, "_ARRIVAL_SECONDS", 0.0)
    slurm.write("sbatch", "kill -9 $PPID")
    submit_in_killed_process(sweep)
    slurm.write("squeue", "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1")
    launcher, jobs = sweep()
    monkeypatch.setattr(launcher, "prepare", lambda job: None)
    with JobQueue(launcher) as queue:
        queue.add(jobs)
        assert slurm.num_submissions == 0
        slurm.write("squeue", "cat queue")
        slurm.write("sbatch", f"{ACCEPT}; echo 31")
        queue.detach()
    assert slurm.num_submissions == 1


def test_lookup_ignores_filters_of_squeue_in_the_environment(sweep, slurm, monkeypatch):
    monkeypatch.setenv("SQUEUE_PARTITION", "gpus")
    slurm.write("sbatch", f"{ACCEPT}; kill -9 $PPID")
    slurm.write("squeue", '[ -n "$SQUEUE_PARTITION" ] || cat queue')
    submit_in_killed_process(sweep)
    launcher, jobs = sweep()
    assert launcher.attach(jobs) == {0: "31_0", 1: "31_1"}


def test_rejected_jobs_leave_no_record(sweep, slurm):
    slurm.write("sbatch", "echo 'sbatch: error: invalid partition specified: gpus' >&2; exit 1")
    launcher, jobs = sweep()
    with pytest.raises(ConfigError, match="Slurm rejects the jobs: invalid partition specified: gpus"):
        launcher.submit(jobs)
    assert OpenSubmission.load(jobs[0].run_dir.parent) is None
    assert [path.name for path in (jobs[0].run_dir.parent / ".submitit").iterdir()] == []
    assert launcher.attach(jobs) == {}


def test_jobs_of_another_cluster_are_not_looked_up(sweep, slurm):
    slurm.write("sbatch", f"{ACCEPT}; kill -9 $PPID")
    submit_in_killed_process(sweep)
    slurm.write("scontrol", SCONTROL.replace("lab", "other"))
    launcher, jobs = sweep()
    assert launcher.attach(jobs) == {}
    assert OpenSubmission.load(jobs[0].run_dir.parent) is None


@pytest.mark.parametrize("content", ["", "[]", '{"script": "x"}'])
def test_damaged_record_of_a_submission_is_refused_with_a_remedy(sweep, slurm, content):
    launcher, jobs = sweep()
    (jobs[0].run_dir.parent / OPEN_SUBMISSION).write_text(content)
    with pytest.raises(ConfigError, match=r"sweep, whose slurm_submission.json .*; cancel the jobs of the sweep"):
        launcher.attach(jobs)


def test_job_that_slurm_requeues_during_the_lookup_is_not_submitted_again(sweep, slurm):
    """The first query reports the requeued job as ended, the second one as pending."""
    launcher, jobs = sweep()
    launcher.submit(jobs)
    ended, pending = ARRAY.format(state="PREEMPTED").strip(), ARRAY.format(state="PENDING").strip()
    show = f"[ -e seen ] && echo '{pending}' || echo '{ended}'; touch seen"
    slurm.write("scontrol", f"[ $2 = config ] && echo 'ClusterName             = lab' || {{ {show}; }}")
    launcher, jobs = sweep()
    assert launcher.attach(jobs) == {0: "31_0", 1: "31_1"}


def test_jobs_that_have_ended_are_not_attached(sweep, slurm):
    launcher, jobs = sweep()
    launcher.submit(jobs)
    slurm.report_jobs(ARRAY.format(state="FAILED"))
    launcher, jobs = sweep()
    assert launcher.attach(jobs) == {}
    assert [Submission.load(job.run_dir) for job in jobs] == [None, None]
