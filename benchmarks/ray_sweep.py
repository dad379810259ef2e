"""A sweep on a Ray cluster of two nodes, one of which is killed.

    python benchmarks/ray_sweep.py [--jobs 20]

starts two nodes of one core on this machine, and a sweep whose jobs run one on each node. After a third of the jobs has
finished, SIGKILL ends the second node and all of its processes while its job trains, and a new node takes its place. At
the end, checksums of tensors and RNG states, trainer state and recorded numbers of every job are compared with a sweep
of `hydra/launcher=sequential`. Requires the package ray.
"""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kills import outcome
from records import Column, Row, Values, finish, parser
from sweeps import seeds, start, states, wait

from foundry.run_dir.status import read_status

STEPS, INTERVAL = 600, 50
RUN = [f"hparams.max_steps={STEPS}", f"checkpoint.interval={INTERVAL}", "tracking.log_every_n_steps=1"]
NODE = {"num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False}
FAST_DETECTION = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 500, "health_check_timeout_ms": 5000}
COLUMNS = [
    Column(key="jobs", heading="jobs"),
    Column(key="killed", heading="nodes killed"),
    Column(key="restarts", heading="restarts of jobs"),
    Column(key="sequential", heading="sequential, s"),
    Column(key="ray", heading="Ray, with Ray's own start, s"),
    Column(key="result", heading="result"),
]


@contextmanager
def two_nodes() -> Iterator[Any]:
    """Start a cluster of two nodes, which `RAY_ADDRESS` names."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # read at import
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "_system_config": FAST_DETECTION})
    cluster.add_node(**NODE)
    os.environ["RAY_ADDRESS"] = cluster.address
    try:
        yield cluster
    finally:
        cluster.shutdown()


def descendants(pid: int) -> Iterator[int]:
    """Yield the processes below a process."""
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        for child in map(int, (thread / "children").read_text().split()):
            yield child
            yield from descendants(child)


def replace_second_node(cluster: Any) -> None:
    """Kill all processes of the second node, and add a new node."""
    node = next(iter(cluster.worker_nodes))
    raylet = node.all_processes["raylet"][0].process.pid
    for pid in [raylet, *descendants(raylet)]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    cluster.worker_nodes.remove(node)
    cluster.add_node(**NODE)


def wait_for_a_step(sweep: Path, jobs: int) -> None:
    """Wait until a third of the jobs has finished and each running job has saved a checkpoint but is not at its end."""
    while True:
        running = [sweep / str(job) for job in range(jobs) if _state(sweep / str(job)) == "running"]
        checkpoints = [len(list(folder.glob("checkpoints/step_*"))) for folder in running]
        if states(sweep)["finished"] >= jobs // 3 and len(running) == 2 and all(checkpoints):
            return
        time.sleep(0.02)


def _state(run_dir: Path) -> str:
    return str(read_status(run_dir).get("state"))


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--jobs", type=int, default=20)
    options = cli.parse_args()
    jobs = 4 if options.smoke else options.jobs
    with tempfile.TemporaryDirectory(prefix="ray-sweep-") as temporary:
        folder, begin = Path(temporary), time.monotonic()
        words = ["-m", *RUN, seeds(jobs)]
        wait(folder, start(folder, *words, "hydra.sweep.dir=undisturbed"))
        sequential, begin = time.monotonic() - begin, time.monotonic()
        with two_nodes() as cluster:
            process = start(folder, *words, "hydra/launcher=ray", "hydra.sweep.dir=killed")
            wait_for_a_step(folder / "killed", jobs)
            replace_second_node(cluster)
            wait(folder, process)
        seconds, sweep = time.monotonic() - begin, folder / "killed"
        assert states(sweep) == {"finished": jobs}
        for job in range(jobs):
            assert outcome(sweep / str(job)) == outcome(folder / "undisturbed" / str(job)), f"job {job} differs"
        restarts = [reason for job in range(jobs) for reason in read_status(sweep / str(job)).get("restarts", [])]
        assert restarts, "no job was running on the node that was killed"
        assert all("has died" in reason for reason in restarts), restarts
    values: dict[str, Values] = {
        "jobs": [jobs],
        "killed": [1],
        "restarts": [len(restarts)],
        "sequential": [sequential],
        "ray": [seconds],
        "result": f"all {jobs} bit-identical",
    }
    finish(options, side="sweep", columns=COLUMNS, rows=[Row(side="two nodes of one core", values=values)])


if __name__ == "__main__":
    main()
