"""State of a job, derived from its Job or TrainJob and from its pods."""

from collections.abc import Iterator, Sequence

from foundry.core.errors import first_line, listed
from foundry.core.exit_codes import ExitCode, Retry, codes
from foundry.launch.job_state import JobState, Phase
from foundry.launch.kubernetes.manifests import CONTAINER, Manifest

_OUT_OF_TIME = "DeadlineExceeded"
_LONGEST_LIST = 3
_ENDING_CODES = set(codes(Retry.never, Retry.useless)) - {ExitCode.SUCCESS}


def has_ended(job: Manifest) -> bool:
    """Return whether a job will not run any more."""
    conditions = _conditions(job)
    return "Complete" in conditions or "Failed" in conditions


def job_state(job: Manifest, pods: Sequence[Manifest]) -> JobState:
    """Return the state of a job.

    Args:
        job: the Job or TrainJob.
        pods: its pods; a pod that failed remains beside the pod that replaces it.
    """
    conditions = _conditions(job)
    if failure := conditions.get("Failed"):
        reason, message = failure.get("reason", ""), first_line(failure.get("message") or "no message")
        causes = list(dict.fromkeys(_pod_failures(pods)))
        text = f"; {listed(causes, _LONGEST_LIST)}" if causes else ""
        detail = f"Kubernetes: {reason or 'Failed'} ({message}){text}"
        return JobState(phase=Phase.ENDED, detail=detail, was_forced=reason == _OUT_OF_TIME)
    if "Complete" in conditions:
        return JobState(phase=Phase.ENDED, detail="Kubernetes: Complete, but the run recorded no end", outcome="lost")
    running = [pod for pod in pods if _phase(pod) == "Running"]
    if running:
        nodes = sorted({pod["spec"].get("nodeName") or "" for pod in running} - {""})
        return JobState(phase=Phase.RUNNING, detail=listed(nodes, _LONGEST_LIST))
    if "Suspended" in conditions:
        return JobState(phase=Phase.WAITING, detail="suspended, as by a queue")
    return JobState(phase=Phase.WAITING, detail=next((reason for pod in pods for reason in _waits(pod)), ""))


def choose_pod(pods: Sequence[Manifest]) -> str | None:
    """Return the name of the pod whose output explains the end of a job best; None without pods.

    The others of its pods lost a rank and were replaced, or were stopped when the job failed. So the best pod is one
    that failed with an exit code that ends a job, otherwise the last one that failed.
    """
    best = max(pods, key=_explanatory_value, default=None)
    return None if best is None else str(best["metadata"]["name"])


def _explanatory_value(pod: Manifest) -> tuple[bool, bool, str]:
    ends = list(_ends(pod))
    is_cause = any(end.get("exitCode") in _ENDING_CODES for end in ends)
    return _phase(pod) == "Failed", is_cause, max((end.get("finishedAt") or "" for end in ends), default="")


def _conditions(job: Manifest) -> dict[str, Manifest]:
    conditions = (job.get("status") or {}).get("conditions") or []
    return {item["type"]: item for item in conditions if item.get("status") == "True"}


def _phase(pod: Manifest) -> str:
    return str((pod.get("status") or {}).get("phase", ""))


def _containers(pod: Manifest) -> list[Manifest]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or []
    return [status for status in statuses if status.get("name") == CONTAINER]


def _ends(pod: Manifest) -> Iterator[Manifest]:
    """Yield how the container of a pod ended."""
    for status in _containers(pod):
        if "terminated" in status.get("state", {}):
            yield status["state"]["terminated"]


def _pod_failures(pods: Sequence[Manifest]) -> Iterator[str]:
    """Yield how each failed pod ended, as in `OOMKilled, exit code 137` or `Evicted`."""
    for pod in pods:
        ends = list(_ends(pod))
        for end in ends:
            if code := end.get("exitCode"):
                reason = end.get("reason") or "Error"
                yield f"exit code {code}" if reason == "Error" else f"{reason}, exit code {code}"
        if _phase(pod) == "Failed" and not ends and (reason := pod["status"].get("reason")):
            yield str(reason)


def _waits(pod: Manifest) -> Iterator[str]:
    """Yield why a pod waits, as in `ImagePullBackOff: ...` or `Unschedulable: 0/3 nodes are available`."""
    for status in _containers(pod):
        waiting = status.get("state", {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            message = waiting.get("message")
            yield f"{waiting['reason']}: {first_line(message)}" if message else str(waiting["reason"])
    for condition in (pod.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            reason = condition.get("reason") or "Unschedulable"
            yield f"{reason}: {first_line(condition.get('message') or 'no message')}"
