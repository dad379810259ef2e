"""What Slurm says of jobs: from its controller, which every cluster has, and where that has forgotten, from `sacct`."""

import os
import re
import subprocess
from collections.abc import Collection, Iterator
from dataclasses import dataclass

_TIMEOUT_SECONDS = 60.0
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
_RUNNING = {"RUNNING", "COMPLETING", "STAGE_OUT", "SUSPENDED", "STOPPED", "RESIZING", "SIGNALING"}


class Unreachable(Exception):
    """Slurm does not answer; it says nothing about the jobs."""


@dataclass(frozen=True)
class QueuedJob:
    """A job as Slurm sees it.

    Attributes:
        state: such as PENDING, RUNNING, CANCELLED, OUT_OF_MEMORY.
        reason: why it waits, or ended; empty where Slurm gives none.
        exit_code: `code:signal` of the job's script.
        nodes: where it runs, or ran last.
    """

    state: str
    reason: str = ""
    exit_code: str = "0:0"
    nodes: str = ""

    @property
    def is_waiting(self) -> bool:
        """Whether it has still to start, perhaps not for the first time."""
        return self.state in _WAITING

    @property
    def has_ended(self) -> bool:
        """Whether it will not run any more."""
        return self.state not in _WAITING | _RUNNING

    def __str__(self) -> str:
        details = [f"exit code {self.exit_code}"] if self.exit_code != "0:0" else []
        details += [f"reason {self.reason}"] if self.reason else []
        details += [f"on {self.nodes}"] if self.nodes else []
        return f"Slurm: {self.state}" + (f" ({', '.join(details)})" if details else "")


def query(job_ids: Collection[str]) -> dict[str, QueuedJob]:
    """Look jobs up, such as `31` and `32_0` of an array; one that is missing in the answer Slurm does not know.

    Raises:
        Unreachable: Slurm does not answer now.
    """
    arrays = sorted({job_id.partition("_")[0] for job_id in job_ids})
    known = {name: job for array in arrays for name, job in _from_controller(array)}
    forgotten = sorted(set(job_ids) - set(known))
    if forgotten:
        known |= dict(_from_accounting(forgotten))
    return {name: known[name] for name in job_ids if name in known}


def partitions() -> tuple[dict[str, float], str | None]:
    """The longest time that each partition gives a job, in minutes, and the name of the default one, if there is one.

    Raises:
        Unreachable: Slurm does not answer now.
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
    """The cluster that answers here.

    Raises:
        Unreachable: none does.
    """
    message = _ask(["scontrol", "show", "config"])
    match = re.search(r"^ClusterName\s*= (\S+)$", message.stdout, re.MULTILINE)
    if match is None:
        raise Unreachable(message.stderr.strip())
    return match[1]


def refusal(script: str) -> str | None:
    """Why Slurm would not take a batch script; None where it would, if only to let the job wait.

    `sbatch --test-only` says no to a job, too, that would have to wait for nodes that are down or drained. So its no is
    tried out, with a job that may not start for an hour and is cancelled at once.

    Raises:
        Unreachable: Slurm does not answer now.
    """
    if _ask(["sbatch", "--test-only"], script).returncode == 0:
        return None
    message = _ask(["sbatch", "--parsable", "--begin=now+1hour"], script)
    if message.returncode == 0:
        cancel([message.stdout.strip().partition(";")[0]])
        return None
    lines = (line.removeprefix("sbatch: error: ") for line in message.stderr.splitlines())
    return "; ".join(line for line in lines if line and not line.startswith("Try "))


def will_restart() -> bool | None:
    """Return whether the job of this process is to start again; None if it is of no job, or Slurm does not say.

    A requeue counts as a restart once it is ordered.
    """
    if not (job := os.environ.get("SLURM_JOB_ID")):
        return None
    try:
        message = _ask(["scontrol", "--oneliner", "show", "job", job])
    except Unreachable:
        return None
    restarts = _fields(message.stdout).get("Restarts")
    return None if restarts is None else int(restarts) > int(os.environ.get("SLURM_RESTART_COUNT", 0))


def cancel(job_ids: Collection[str]) -> None:
    """Ask Slurm to end jobs."""
    subprocess.run(["scancel", *job_ids], capture_output=True, timeout=_TIMEOUT_SECONDS, check=False)


def _from_controller(array: str) -> Iterator[tuple[str, QueuedJob]]:
    """A job, or each of an array.

    Raises:
        Unreachable: the controller does not answer.
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
            reason=_named(fields.get("Reason")),
            exit_code=fields.get("ExitCode", "0:0"),
            nodes=_named(fields.get("NodeList")),
        )
        for task in _tasks(fields.get("ArrayTaskId", "")):
            yield (f"{fields['ArrayJobId']}_{task}" if task else fields["JobId"]), job


def _fields(line: str) -> dict[str, str]:
    """`Name=value` fields; of two with one name the first, since a command line may hold anything."""
    return dict(reversed(re.findall(r"(?:^|\s)(\w+)=(\S*)", line)))


def _minutes(text: str) -> float:
    """`[days-]hours:minutes:seconds`, or UNLIMITED."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):(\d+):(\d+)", text)
    if match is None:
        return float("inf")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return (days * 24 + hours) * 60 + minutes + seconds / 60


def _tasks(text: str) -> list[str]:
    """`3`, or of tasks that wait together `1-3,7%256`, as numbers; of no array one without a number."""
    tasks = []
    for item in text.partition("%")[0].split(","):
        first, dash, last = item.partition("-")
        tasks += [str(number) for number in range(int(first), int(last) + 1)] if dash else [first]
    return tasks


def _from_accounting(job_ids: Collection[str]) -> Iterator[tuple[str, QueuedJob]]:
    """What the accounting database has, where a cluster keeps one."""
    columns = "JobID,State,Reason,ExitCode,NodeList"
    message = _ask(["sacct", "--noheader", "--parsable2", "--format", columns, "--jobs", ",".join(job_ids)])
    for line in message.stdout.splitlines():
        values = line.split("|")
        if len(values) == 5 and "." not in values[0]:
            job_id, state, reason, exit_code, nodes = values
            # "CANCELLED by 1000"
            yield job_id, QueuedJob(state.split()[0], _named(reason), exit_code, _named(nodes))


def _named(text: str | None) -> str:
    return "" if text in (None, "None", "(null)", "None assigned", "Unknown") else str(text)


def _ask(command: list[str], script: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run one of Slurm's commands, which may read a script; one that is not there says nothing.

    It has a session of its own: signals to a task of a job, which this process may be, do not reach it.

    Raises:
        Unreachable: it takes too long.
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
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{command[0]} takes more than {_TIMEOUT_SECONDS:g} s") from None
    except FileNotFoundError:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]} is not installed")
