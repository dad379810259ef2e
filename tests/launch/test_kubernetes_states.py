"""State of a job by the conditions of its resource and by its pods."""

import pytest

from foundry.launch.job_state import JobState, Phase
from foundry.launch.kubernetes.states import choose_pod, has_ended, job_state


def resource(*conditions):
    return {"status": {"conditions": [{"type": kind, "status": "True", **more} for kind, more in conditions]}}


def pod(name, phase, *, code=None, reason="Error", finished="", node=None, waiting=None, conditions=()):
    state = {"running": {}}
    if code is not None:
        state = {"terminated": {"exitCode": code, "reason": reason, "finishedAt": finished}}
    elif waiting is not None:
        state = {"waiting": waiting}
    status = {"phase": phase, "containerStatuses": [{"name": "node", "state": state}], "conditions": list(conditions)}
    return {"metadata": {"name": name}, "spec": {"nodeName": node}, "status": status}


UNSCHEDULABLE = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes\nmore"}
KILLED = pod("a", "Failed", code=137, reason="OOMKilled")


@pytest.mark.parametrize(
    ("job", "pods", "state"),
    [
        ({}, [], JobState(phase=Phase.WAITING)),
        (
            resource(("Suspended", {})),
            [],
            JobState(phase=Phase.WAITING, detail="suspended, as by a queue"),
        ),
        (
            {},
            [pod("a", "Pending", waiting={"reason": "ImagePullBackOff", "message": "Back-off"})],
            JobState(phase=Phase.WAITING, detail="ImagePullBackOff: Back-off"),
        ),
        (
            {},
            [pod("a", "Pending", waiting={"reason": "ContainerCreating"}, conditions=[UNSCHEDULABLE])],
            JobState(phase=Phase.WAITING, detail="Unschedulable: 0/3 nodes"),
        ),
        (
            {},
            [KILLED, pod("b", "Running", node="n2"), pod("c", "Running", node="n1")],
            JobState(phase=Phase.RUNNING, detail="n1, n2"),
        ),
        (
            resource(("Failed", {"reason": "BackoffLimitExceeded", "message": "the limit"})),
            [KILLED, KILLED],
            JobState(
                phase=Phase.ENDED,
                detail="Kubernetes: BackoffLimitExceeded (the limit); OOMKilled, exit code 137",
            ),
        ),
        (
            resource(("Failed", {"reason": "DeadlineExceeded", "message": "too long"})),
            [],
            JobState(phase=Phase.ENDED, detail="Kubernetes: DeadlineExceeded (too long)", was_forced=True),
        ),
        (
            resource(("Complete", {})),
            [],
            JobState(phase=Phase.ENDED, detail="Kubernetes: Complete, but the run recorded no end", outcome="lost"),
        ),
    ],
)
def test_state_of_a_job(job, pods, state):
    assert job_state(job, pods) == state
    assert has_ended(job) == (state.phase is Phase.ENDED)


def test_output_is_that_of_the_pod_that_caused_the_end():
    evicted = pod("evicted", "Failed", code=143, finished="2026-01-01T00:00:01Z")
    first, last = (pod(f"lost-{n}", "Failed", code=75, finished=f"2026-01-01T00:00:0{n}Z") for n in (2, 3))
    cause = pod("cause", "Failed", code=1, finished="2026-01-01T00:00:02Z")
    running = pod("running", "Running")
    assert choose_pod([evicted, first, cause, last, running]) == "cause"
    assert choose_pod([running, last, first, evicted]) == "lost-3"
    assert choose_pod([running]) == "running"
    assert choose_pod([]) is None
