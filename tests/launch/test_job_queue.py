"""The queue of jobs, with a launcher whose jobs end in any order, vanish, or do not respond for a while."""

import signal
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from foundry.core.errors import ConfigError, Violation
from foundry.launch import job_queue
from foundry.launch.composed_job import ComposedJob
from foundry.launch.job_queue import JobQueue
from foundry.launch.job_state import JobState, Phase, Unreachable
from foundry.launch.launchers import FrozenLauncher
from foundry.run_dir.status import read_status, write_status

MASTER = {"hydra": {"sweep": {"dir": "s"}}}
CONFIG = OmegaConf.create({"hydra": {"job": {"name": "foundry"}}})


class Script(FrozenLauncher):
    """A launcher without processes: each wait of the queue is a step, and triggers the next event of a script.

    Attributes:
        events: for each step the name of an event and the number of the job that it happens to.
        num_places: number of jobs at a time; None for a scheduler with its own queue.
    """

    title = "Script"
    poll_seconds = (0.001, 0.001)

    def __init__(self, events=(), num_places=None, *, survives=False):
        super().__init__(None)
        self.events, self.num_places, self.survives = iter(events), num_places, survives
        self.running, self.submitted, self.ended = {}, [], {}
        self.refused = set()
        self.cancels, self.unreachable_steps, self.flickers, self.signals, self.max_running = [], 0, set(), [], 0
        self.reported_flickers = set()
        self.setup(hydra_context=None, task_function=None, config=OmegaConf.create(MASTER))

    def places(self, configs, limit):
        return self.num_places

    def prepare(self, job):
        job.run_dir.mkdir(exist_ok=True)
        write_status(job.run_dir, state="queued", reason="")

    def submit(self, jobs):
        assert not self.signals or self.survives, "no job starts after a signal"
        if self.unreachable_steps:
            raise Unreachable("no route")
        for job in jobs:
            if job.index in self.refused:
                raise ConfigError(Violation("hydra.launcher", "is refused"))
            self.submitted.append(job.index)
            self.running[f"id{job.index}"] = job
        self.max_running = max(self.max_running, len(self.running))
        return {job.index: f"id{job.index}" for job in jobs}

    def poll(self, ids):
        if self.unreachable_steps:
            raise Unreachable("no route")
        states = {job_id: JobState(phase=Phase.RUNNING) for job_id in self.running}
        states |= {job_id: end for job_id, end in self.ended.items() if end is not None}
        states |= {job_id: JobState(phase=Phase.ENDED, detail="flicker") for job_id in self.flickers & set(states)}
        self.reported_flickers, self.flickers = self.flickers, set()
        return {job_id: state for job_id, state in states.items() if job_id in ids}

    def cancel(self, ids, *, kill=False):
        if self.unreachable_steps:
            raise Unreachable("no route")
        self.cancels.append((sorted(ids), kill))

    def logs(self, job_id):
        return f"last words of {job_id}"

    def wait(self, seconds):
        self.unreachable_steps = max(0, self.unreachable_steps - 1)
        event, number = next(self.events, ("finish", 0))
        if event in ("SIGINT", "SIGTERM"):
            self.signals.append(signal.Signals[event])
            signal.raise_signal(self.signals[-1])
        elif event == "unreachable":
            self.unreachable_steps = 3
        elif self.running:
            job_id = sorted(self.running)[number % len(self.running)]
            getattr(self, event)(job_id, self.running[job_id])

    def do_nothing(self, job_id, job):
        """Let the job run."""

    def flicker(self, job_id, job):
        """Report the end of a running job once, as Slurm does before it requeues the job."""
        if job_id not in self.reported_flickers:
            self.flickers.add(job_id)

    def finish(self, job_id, job):
        write_status(self.running.pop(job_id).run_dir, state="finished")
        self.ended[job_id] = JobState(phase=Phase.ENDED, detail="exit code 0")

    def fail(self, job_id, job):
        write_status(self.running.pop(job_id).run_dir, state="failed", reason="its own reason")
        self.ended[job_id] = JobState(phase=Phase.ENDED, detail="exit code 1")

    def die(self, job_id, job):
        write_status(self.running.pop(job_id).run_dir, state="running")
        self.ended[job_id] = JobState(phase=Phase.ENDED, detail="killed")

    def vanish(self, job_id, job):
        write_status(self.running.pop(job_id).run_dir, state="running")
        self.ended[job_id] = None


def make_jobs(folder, count):
    return [
        ComposedJob(index=index, overrides=(), label="", run_dir=folder / str(index), config=CONFIG)
        for index in range(count)
    ]


@pytest.fixture
def jobs(tmp_path):
    return make_jobs(tmp_path, 3)


def drain(queue):
    ended = []
    while batch := queue.next_ended():
        ended += batch
    return ended


def state_of(job):
    status = read_status(job.run_dir)
    return status.get("state"), status.get("reason")


EVENTS = st.tuples(
    st.sampled_from(["finish", "fail", "die", "vanish", "flicker", "unreachable", "SIGINT", "SIGTERM"]),
    st.integers(0, 9),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(EVENTS, max_size=15), st.integers(1, 5), st.one_of(st.none(), st.integers(1, 3)))
def test_each_job_runs_at_most_once_and_each_end_is_recorded(events, num_jobs, num_places):
    with TemporaryDirectory() as folder:
        jobs = make_jobs(Path(folder), num_jobs)
        launcher = Script(events, num_places)
        ended, error = [], None
        try:
            with JobQueue(launcher) as queue:
                queue.add(jobs)
                ended = drain(queue)
        except (KeyboardInterrupt, SystemExit) as stop:
            error = stop
        states = [state_of(job) for job in jobs]
        num_interrupts = launcher.signals.count(signal.SIGINT)
        assert not launcher.running or num_interrupts > 2, "the queue leaves no job behind"
        assert sorted(launcher.submitted) == sorted(set(launcher.submitted))
        assert launcher.max_running <= (num_places or num_jobs)
        if not launcher.signals:
            assert error is None
            assert sorted(job.index for job in ended) == list(range(num_jobs))
            assert launcher.cancels == []
        else:
            first = launcher.signals[0]
            is_interrupt = first is signal.SIGINT
            assert isinstance(error, KeyboardInterrupt) if is_interrupt else error.code == 128 + first
            kills = [kill for _, kill in launcher.cancels]
            assert kills.count(False) <= 1
            assert kills == sorted(kills)
            assert True not in kills or num_interrupts > 1
        for job, (state, reason) in zip(jobs, states, strict=True):
            expected = {
                "exit code 0": ("finished", ""),
                "exit code 1": ("failed", "its own reason"),
                "killed": ("failed", f"killed; last output: last words of id{job.index}"),
            }
            if job.index not in launcher.submitted:
                assert state is None
            elif num_interrupts > 2:  # the queue may have left the job
                continue
            elif state == "stopped":
                assert reason == launcher.signals[0].name
            elif (end := launcher.ended[f"id{job.index}"]) is None:
                assert state == "lost"
                assert reason == f"Script no longer knows job id{job.index}; it recorded no end"
            else:
                assert (state, reason) == expected[end.detail]


def test_a_job_starts_as_soon_as_a_place_is_free(jobs):
    launcher = Script([("finish", 1), ("finish", 0), ("finish", 0)], num_places=2)
    with JobQueue(launcher) as queue:
        queue.add(jobs[:2])
        assert queue.free == 0
        assert [job.index for job in queue.next_ended()] == [1]
        assert queue.free == 1
        queue.add(jobs[2:])
        assert launcher.submitted == [0, 1, 2]
        assert [job.index for job in drain(queue)] == [0, 2]


def test_a_job_that_ended_can_be_added_again(jobs):
    launcher = Script()
    with JobQueue(launcher, limit=1) as queue:
        for _ in range(2):
            queue.add(jobs[:1])
            assert queue.next_ended() == jobs[:1]
    assert launcher.submitted == [0, 0]


def test_a_scheduler_that_does_not_respond_is_reported_once_for_each_outage(jobs, capsys):
    launcher = Script([("unreachable", 0), *[("flicker", 0)] * 4, ("unreachable", 0)])
    with JobQueue(launcher) as queue:
        queue.add(jobs)
        assert len(drain(queue)) == 3
    assert capsys.readouterr().out.count("Script does not respond, the wait continues: no route") == 2


def test_ctrl_c_reaches_jobs_of_a_scheduler_that_responds_again(jobs):
    launcher = Script([("unreachable", 0), ("SIGTERM", 0)])
    with pytest.raises(SystemExit, match="143"):
        launcher.start(jobs)
    assert [kill for _, kill in launcher.cancels] == [False]
    assert [state_of(job) for job in jobs] == [("finished", "")] * 3


def test_a_third_ctrl_c_leaves_jobs_of_a_scheduler_that_does_not_respond(jobs, capsys):
    launcher = Script([("unreachable", 0), *[("SIGINT", 0), ("unreachable", 0)] * 3])
    with pytest.raises(KeyboardInterrupt):
        launcher.start(jobs)
    assert launcher.cancels == []
    assert "id0, id1, id2 may still be running" in capsys.readouterr().out


@pytest.mark.parametrize("survives", [True, False])
def test_jobs_wait_until_the_scheduler_accepts_them(jobs, survives, capsys):
    launcher = Script(survives=survives)
    launcher.unreachable_steps = 3
    with JobQueue(launcher) as queue:
        queue.add(jobs)
        assert launcher.submitted == []
        assert len(drain(queue)) == 3
    assert launcher.submitted == [0, 1, 2]
    assert capsys.readouterr().out.count("Script does not respond, the wait continues: no route") == 1


DETACHED = OmegaConf.create({"hydra": {**MASTER["hydra"], "launcher": {"detach": True}}})


def test_detached_jobs_are_submitted_before_the_command_ends(jobs, capsys):
    launcher = Script([("do_nothing", 0)] * 9, survives=True)
    launcher.unreachable_steps, launcher.master = 3, DETACHED
    launcher.start(jobs)
    assert launcher.submitted == [0, 1, 2]
    assert set(launcher.running) == {"id0", "id1", "id2"}
    assert "3 jobs left in the queue: id0, id1, id2" in capsys.readouterr().out


def test_ctrl_c_names_the_number_of_jobs_that_are_not_submitted(jobs, capsys):
    launcher = Script([("SIGINT", 0)], survives=True)
    launcher.unreachable_steps, launcher.master = 9, DETACHED
    with pytest.raises(KeyboardInterrupt):
        launcher.start(jobs)
    assert launcher.submitted == []
    assert "3 jobs not submitted; the same command with hydra.sweep.dir=s submits them" in capsys.readouterr().out


def test_ctrl_c_while_jobs_are_submitted_names_their_number(jobs, monkeypatch, capsys):
    def submit(jobs):
        signal.raise_signal(signal.SIGINT)  # blocked until the end of the request
        raise Unreachable("no route")

    launcher = Script(survives=True)
    monkeypatch.setattr(launcher, "submit", submit)
    with pytest.raises(KeyboardInterrupt):
        launcher.start(jobs)
    assert "3 jobs not submitted" in capsys.readouterr().out


def test_jobs_that_were_submitted_before_a_refusal_are_named(jobs, monkeypatch, capsys):
    launcher = Script(survives=True)
    launcher.refused = {2}

    def attach(jobs):
        return {job.index: f"id{job.index}" for job in jobs if f"id{job.index}" in launcher.running}

    monkeypatch.setattr(launcher, "attach", attach)
    with pytest.raises(ConfigError, match="is refused"):
        launcher.start(jobs)
    assert "2 jobs left in the queue: id0, id1" in capsys.readouterr().out
    assert launcher.cancels == []


def test_an_error_of_the_sweeper_stops_the_running_jobs(jobs):
    launcher = Script()

    def fail():
        with JobQueue(launcher, limit=2) as queue:
            queue.add(jobs)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert launcher.cancels == [(["id0", "id1"], False)]
    assert launcher.submitted == [0, 1]
    assert [state_of(job)[0] for job in jobs[:2]] == ["finished"] * 2


@pytest.mark.parametrize("answer", [True, False])
def test_ctrl_c_asks_about_jobs_that_continue_without_this_process(jobs, answer, monkeypatch, capsys):
    monkeypatch.setattr(job_queue, "_ask_to_cancel", lambda: answer)
    launcher = Script([("finish", 0), ("SIGINT", 0)], survives=True)
    with pytest.raises(KeyboardInterrupt):
        launcher.start(jobs)
    output = capsys.readouterr().out
    if answer:
        assert launcher.cancels == [(["id1", "id2"], False)]
        assert not launcher.running
        assert "canceled; running jobs save a checkpoint first" in output
    else:
        assert launcher.detached
        assert launcher.cancels == []
        assert "2 jobs left in the queue: id1, id2" in output


def test_ctrl_c_during_the_wait_for_canceled_jobs_names_them(jobs, monkeypatch, capsys):
    monkeypatch.setattr(job_queue, "_ask_to_cancel", lambda: True)
    launcher = Script([("SIGINT", 0), ("unreachable", 0), ("SIGINT", 0)], survives=True)
    with pytest.raises(KeyboardInterrupt):
        launcher.start(jobs)
    assert launcher.detached
    assert "3 jobs left in the queue: id0, id1, id2" in capsys.readouterr().out


def test_jobs_of_an_earlier_command_are_watched_and_not_submitted_again(jobs, monkeypatch, capsys):
    launcher = Script(survives=True)
    jobs[1].run_dir.mkdir()
    write_status(jobs[1].run_dir, state="running", step=7)
    launcher.running["id1"] = jobs[1]
    monkeypatch.setattr(launcher, "attach", lambda jobs: {1: "id1"})
    with JobQueue(launcher) as queue:
        queue.add(jobs)
        assert read_status(jobs[1].run_dir)["state"] == "running"
        assert len(drain(queue)) == 3
    assert launcher.submitted == [0, 2]
    assert "job 1 is already in the queue as id1\n3 jobs in the queue: id1, id0, id2\n" in capsys.readouterr().out


def test_end_of_a_job_is_recorded_without_its_output_if_the_scheduler_does_not_respond(jobs, monkeypatch):
    def logs(job_id):
        raise Unreachable("no route")

    launcher = Script([("die", 0)])
    monkeypatch.setattr(launcher, "logs", logs)
    with JobQueue(launcher) as queue:
        queue.add(jobs[:1])
        assert drain(queue) == jobs[:1]
    assert state_of(jobs[0]) == ("failed", "killed")


def test_the_reason_of_a_stopped_job_names_the_preemption(jobs):
    launcher = Script()

    def preempt(job_id, job):
        write_status(launcher.running.pop(job_id).run_dir, state="stopped", reason="SIGTERM")
        launcher.ended[job_id] = JobState(phase=Phase.ENDED, detail="PREEMPTED", was_forced=True)

    launcher.preempt, launcher.events = preempt, iter([("preempt", 0)])
    with JobQueue(launcher) as queue:
        queue.add(jobs[:1])
        drain(queue)
    assert state_of(jobs[0]) == ("stopped", "SIGTERM; PREEMPTED")


def test_a_signal_before_the_first_job_ends_the_queue(jobs):
    launcher = Script(num_places=1)
    with suppress(KeyboardInterrupt), JobQueue(launcher) as queue:
        queue.add([])
        signal.raise_signal(signal.SIGINT)
        assert queue.free == 0
        queue.add(jobs)
        queue.next_ended()
        raise AssertionError("next_ended raises KeyboardInterrupt")
    assert launcher.submitted == []
