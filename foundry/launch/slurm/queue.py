"""Requests to Slurm: to its controller, which every cluster has, or for jobs that it has forgotten, to `sacct`."""

import fcntl
import os
import re
import subprocess
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from foundry.launch.job_state import JobState, Phase, Unreachable
from foundry.run_dir.files import open_regular

_TIMEOUT_SECONDS = 60.0
_SECOND_LOOK_SECONDS = 2.0
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"}
_LOST = {"NODE_FAIL", "BOOT_FAIL", "COMPLETED", "PREEMPTED"}
_HAS_ENDED = re.compile("Invalid job id|already completing or completed")
"""Messages of scancel about a job that has ended."""
_OUTAGE = re.compile("Unable to contact slurm controller|Socket timed out|Zero Bytes were transmitted|in standby mode")
"""Messages of sbatch about a controller that does not respond; it may have accepted the job nevertheless."""
_FILTERS = "SQUEUE_"
"""Prefix of environment variables that filter the output of squeue."""
_ENDED_BY_SLURM = {"CANCELLED", "NODE_FAIL", "PREEMPTED", "TIMEOUT"}


@dataclass(frozen=True)
class QueuedJob:
    """State of a job in Slurm.

    Attributes:
        state: such as PENDING, RUNNING, CANCELLED, OUT_OF_MEMORY.
        reason: why the job waits or ended; empty if Slurm gives no reason.
        exit_code: `code:signal` of the job's script.
        nodes: nodes on which the job runs, or ran last.
    """

    state: str
    reason: str = ""
    exit_code: str = "0:0"
    nodes: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether the job is waiting to start, possibly after an earlier attempt."""
        return self.state in _WAITING

    @property
    def has_ended(self) -> bool:
        """Whether the job will not run any more."""
        return self.state not in _WAITING | _RUNNING

    def as_job_state(self) -> JobState:
        """Return the state in the terms of all launchers."""
        if self.has_ended:
            outcome = "lost" if self.state in _LOST else "stopped" if self.state == "CANCELLED" else "failed"
            was_forced = self.state in _ENDED_BY_SLURM
            return JobState(phase=Phase.ENDED, detail=str(self), outcome=outcome, was_forced=was_forced)
        if self.is_waiting:
            return JobState(phase=Phase.WAITING, detail=self.reason)
        return JobState(phase=Phase.RUNNING, detail=self.nodes)

    def __str__(self) -> str:
        details = [f"exit code {self.exit_code}"] if self.exit_code != "0:0" else []
        details += [f"reason {self.reason}"] if self.reason else []
        details += [f"on {self.nodes}"] if self.nodes else []
        return f"Slurm: {self.state}" + (f" ({', '.join(details)})" if details else "")


def query(job_ids: Collection[str]) -> dict[str, QueuedJob]:
    """Return the states of jobs by id (`31`, or `32_0` for a task of an array); jobs unknown to Slurm are omitted.

    Raises:
        Unreachable: Slurm does not respond.
    """
    arrays = sorted({job_id.partition("_")[0] for job_id in job_ids})
    states = {name: job for array in arrays for name, job in _from_controller(array)}
    missing_ids = sorted(set(job_ids) - set(states))
    if missing_ids:
        states |= dict(_from_accounting(missing_ids))
    return {name: states[name] for name in job_ids if name in states}


def query_twice(job_ids: Collection[str]) -> dict[str, QueuedJob]:
    """Return the states of jobs like `query`, after a second query 2 s later if a job seems to have ended.

    Slurm briefly reports a job that it is about to requeue as ended.

    Raises:
        Unreachable: Slurm does not respond.
    """
    states = {job_id: job for job_id, job in query(job_ids).items() if not job.has_ended}
    if suspects := set(job_ids) - set(states):
        time.sleep(_SECOND_LOOK_SECONDS)
        states |= query(suspects)
    return states


def find_script(script: Path) -> str | None:
    """Return the id of the job, or of the array, that was submitted with a batch script; None if Slurm knows none.

    Raises:
        Unreachable: Slurm does not respond.
    """
    variables = {name: value for name, value in os.environ.items() if not name.startswith(_FILTERS)}
    columns = "--format=%F %o"  # id of the job or the array, and path of its script
    message = _ask(["squeue", "--noheader", "--me", "--all", "--states=all", columns], variables=variables)
    if message.returncode:
        raise Unreachable(message.stderr.strip())
    for line in message.stdout.splitlines():
        job_id, _, command = line.strip().partition(" ")
        if command == str(script):
            return job_id
    return None


def partitions() -> tuple[dict[str, float], str | None]:
    """Return the time limit of each partition in minutes, and the default partition's name, if the cluster has one.

    Raises:
        Unreachable: Slurm does not respond.
    """
    message = _ask(["scontrol", "--oneliner", "show", "partition"])
    if message.returncode:
        raise Unreachable(message.stderr.strip())
    limits, default = {}, None
    for line in message.stdout.splitlines():
        fields = _fields(line)
        limits[fields["PartitionName"]] = _minutes(fields["MaxTime"])
        if fields.get("Default") == "YES":
            default = fields["PartitionName"]
    return limits, default


def cluster_name() -> str:
    """Return the name of the cluster that this machine belongs to.

    Raises:
        Unreachable: Slurm does not respond.
    """
    message = _ask(["scontrol", "show", "config"])
    match = re.search(r"^ClusterName\s*= (\S+)$", message.stdout, re.MULTILINE)
    if match is None:
        raise Unreachable(message.stderr.strip())
    return match[1]


def refusal(script: str) -> str | None:
    """Return why Slurm would reject a batch script; None if Slurm accepts it, even if the job would have to wait.

    `sbatch --test-only` also rejects a job that would have to wait for nodes that are down or drained. So a rejection
    is verified by submitting a job that may not start for an hour and is canceled at once.

    Raises:
        Unreachable: Slurm does not respond.
    """
    if _ask(["sbatch", "--test-only"], script).returncode == 0:
        return None
    message = _ask(["sbatch", "--parsable", "--begin=now+1hour"], script)
    if message.returncode == 0:
        cancel([_submitted_id(message.stdout)])
        return None
    return _rejection(message.stderr)


class Rejected(Exception):
    """Slurm rejects a batch script; the message has the reason."""


def submit_script(script: Path) -> str:
    """Submit a batch script, and return the id of the job or of the array.

    The script is locked until `sbatch` has ended, even if this process is killed before.

    Raises:
        Rejected: Slurm rejects the script.
        Unreachable: there is no answer; `find_script` tells whether Slurm has accepted the script.
    """
    with open_regular(script, "a") as file:
        with suppress(OSError):  # the file system may not support locks
            fcntl.flock(file, fcntl.LOCK_EX)
        message = _ask(["sbatch", "--parsable", str(script)], descriptors=[file.fileno()])
    if message.returncode:
        reason = _rejection(message.stderr)
        if message.returncode < 0 or not reason:  # killed, possibly after Slurm has accepted the script
            raise Unreachable(reason or f"sbatch ended with exit code {message.returncode} and no message")
        raise Rejected(reason)
    return _submitted_id(message.stdout)


def is_submitting(script: Path) -> bool:
    """Return whether an `sbatch` that `submit_script` has started still runs, also for another process."""
    try:
        with open_regular(script) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # the script is missing, or the file system does not support locks
        return False
    return False


def _submitted_id(output: str) -> str:
    """Return the id that `sbatch --parsable` has printed, as in `31` or `31;cluster`.

    Raises:
        Unreachable: it has printed none.
    """
    match = re.search(r"^(\d+)(;\S+)?$", output, re.MULTILINE)
    if match is None:
        raise Unreachable(f"sbatch printed no job id but {output.strip()!r}")
    return match[1]


def _rejection(errors: str) -> str:
    """Return the reason in error messages of sbatch.

    Raises:
        Unreachable: the reason is that the controller does not respond.
    """
    lines = (line.removeprefix("sbatch: error: ") for line in errors.splitlines())
    reason = "; ".join(line for line in lines if line and not line.startswith("Try "))
    if _OUTAGE.search(reason):
        raise Unreachable(reason)
    return reason


def will_restart() -> bool | None:
    """Return whether Slurm will restart the job of this process; None outside of a job, or if Slurm does not report it.

    Slurm counts a requeue as a restart as soon as it is requested.
    """
    if not (job := os.environ.get("SLURM_JOB_ID")):
        return None
    try:
        message = _ask(["scontrol", "--oneliner", "show", "job", job])
    except Unreachable:
        return None
    restarts = _fields(message.stdout).get("Restarts")
    return None if restarts is None else int(restarts) > int(os.environ.get("SLURM_RESTART_COUNT", 0))


def cancel(job_ids: Collection[str], *, kill: bool = False) -> None:
    """Cancel jobs with `scancel`; if `kill` is set, their processes get SIGKILL at once.

    Raises:
        Unreachable: Slurm does not respond, or refuses to cancel a job that has not ended.
    """
    options = ["--signal=KILL", "--full"] if kill else []
    message = _ask(["scancel", *options, *job_ids])
    errors = [line for line in message.stderr.splitlines() if not _HAS_ENDED.search(line)]
    if message.returncode and errors:
        raise Unreachable(errors[0])


def _from_controller(array: str) -> Iterator[tuple[str, QueuedJob]]:
    """Yield the id and the state of a job, or of each task of an array.

    Raises:
        Unreachable: the controller does not respond.
    """
    message = _ask(["scontrol", "--oneliner", "show", "job", array])
    if message.returncode and "Invalid job id" not in message.stderr:
        raise Unreachable(message.stderr.strip())
    for line in message.stdout.splitlines():
        fields = _fields(line)
        if "JobState" not in fields:
            continue
        job = QueuedJob(
            state=fields["JobState"],
            reason=_text_or_empty(fields.get("Reason")),
            exit_code=fields.get("ExitCode", "0:0"),
            nodes=_text_or_empty(fields.get("NodeList")),
        )
        for task in _tasks(fields.get("ArrayTaskId", "")):
            yield (f"{fields['ArrayJobId']}_{task}" if task else fields["JobId"]), job


def _fields(line: str) -> dict[str, str]:
    """Parse `Name=value` fields; the first of equal names wins, because a command line in `line` may repeat a name."""
    return dict(reversed(re.findall(r"(?:^|\s)(\w+)=(\S*)", line)))


def _minutes(text: str) -> float:
    """Parse `[days-]hours:minutes:seconds` to minutes; infinity for UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return float("inf")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes + seconds / 60


def _tasks(text: str) -> list[str]:
    """Parse the task ids of an array: `3`, or `1-3,7%256` or `0-8:2` for pending tasks; `[""]` without an array."""
    tasks = []
    for item in text.partition("%")[0].split(","):
        numbers, _, step = item.partition(":")
        first, dash, last = numbers.partition("-")
        tasks += [str(number) for number in range(int(first), int(last) + 1, int(step or 1))] if dash else [first]
    return tasks


def _from_accounting(job_ids: Collection[str]) -> Iterator[tuple[str, QueuedJob]]:
    """Yield the id and the state of jobs in the accounting database, if the cluster has one."""
    columns = "JobID,State,Reason,ExitCode,NodeList"
    message = _ask(["sacct", "--noheader", "--parsable2", "--format", columns, "--jobs", ",".join(job_ids)])
    for line in message.stdout.splitlines():
        values = line.split("|")
        if len(values) == 5 and "." not in values[0]:
            job_id, state, reason, exit_code, nodes = values
            # `split`, because the state may name a user, as in "CANCELLED by 1000".
            yield job_id, QueuedJob(state.split()[0], _text_or_empty(reason), exit_code, _text_or_empty(nodes))


def _text_or_empty(text: str | None) -> str:
    return "" if text in (None, "None", "(null)", "None assigned", "Unknown") else str(text)


def _ask(
    command: list[str],
    script: str | None = None,
    *,
    variables: Mapping[str, str] = os.environ,
    descriptors: Sequence[int] = (),
) -> "subprocess.CompletedProcess[str]":
    """Run a Slurm command; a missing command gives exit code 127 and no output.

    The command has its own session, so that signals to this process, which may be a task of a job, do not reach it.

    Args:
        command: the command and its arguments.
        script: text for its standard input.
        variables: its environment variables.
        descriptors: open files that it inherits.

    Raises:
        Unreachable: the command timed out.
    """
    try:
        return subprocess.run(
            command,
            input=script,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
            start_new_session=True,
            pass_fds=descriptors,
            env={**variables, "SLURM_BITSTR_LEN": "0"},  # otherwise scontrol shortens long lists of task ids
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} takes more than {_TIMEOUT_SECONDS:g} s") from None
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")
