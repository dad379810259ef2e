"""Runs with `checkpoint.mirror`: kills with the run directory deleted each time, and the wait of the training thread.

`kills`: a run of `benchmarks/kills.py` copies itself to an S3 server on loopback (moto). All its processes are killed
by SIGKILL at a random moment of its life or training, its directory is deleted, and the same command starts again,
until the run is done; then the next run starts from scratch, until there were enough kills. The end is compared with an
undisturbed run without a mirror: checksums of all tensors and RNG states, the trainer's state and all recorded numbers.
The command starts in a fork of a process that has imported everything, so that most moments are in training.
The server counts the bytes of objects that it received more than once.

`saves`: one process saves the same state in turn with and without a mirror, whose server is another process.

    python benchmarks/mirror.py kills [--kills 30] [--seed 0]
    python benchmarks/mirror.py saves [--megabytes 100] [--repeats 10]
"""

import json
import multiprocessing
import os
import random
import runpy
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from kills import Count, Life, outcome, undisturbed, wait_and_kill, words_of
from records import Column, Row, Values, finish, parser
from torch import Tensor, nn

from foundry.checkpoint.mirror.main import MainMirror, MirrorState
from foundry.checkpoint.mirror.thread import MirroredRun
from foundry.checkpoint.saver import Checkpointer
from foundry.parallel.process_group import World
from foundry.run_dir.lock import lock
from foundry.run_dir.mirror.lease import Lease
from foundry.run_dir.mirror.snapshot import list_published
from foundry.run_dir.mirror.store import Store

BUCKET = "bucket"
RECORDS = ("published.json", "latest.json", "lease.json", "run.json")
"""Objects that a run replaces; all others are written once."""
FORKS = multiprocessing.get_context("forkserver")
MOMENTS = ("any", "training", "training")


class Server:
    """An S3 server in this process, which counts the bytes of each object that it receives."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Quiet(WSGIRequestHandler):
            def log_request(self, *arguments: Any) -> None:
                """Log nothing."""

        self._app = DomainDispatcherApplication(create_backend_app)
        self._lock = threading.Lock()
        self.received = Counter[str]()
        self.copied_bytes = self.again_bytes = 0
        self.server = make_server("127.0.0.1", 0, self._count, threaded=True, request_handler=Quiet)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _count(self, environ: dict[str, Any], start_response: Any) -> Any:
        path = environ["PATH_INFO"]
        if environ["REQUEST_METHOD"] == "PUT" and path.count("/") > 1 and path.rpartition("/")[2] not in RECORDS:
            size = int(environ.get("HTTP_X_AMZ_DECODED_CONTENT_LENGTH") or environ.get("CONTENT_LENGTH") or 0)
            with self._lock:
                self.received[path] += 1
                self.copied_bytes += size
                self.again_bytes += size * (self.received[path] > 1)
        return self._app(environ, start_response)


class ForkedLife(Life):
    """One start of the command in a fork of a process that has imported everything, so that it starts at once."""

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.output = (folder / "said.txt").open("w+")
        self._fork = FORKS.Process(target=_be_run, args=(folder, words, self.output.name, dict(os.environ)))
        self._fork.start()

    def tree(self) -> list[int]:
        """Return the id of the process, the only one of a run without ranks and data workers."""
        return [self._fork.pid] if self._fork.pid is not None and self._fork.is_alive() else []

    def kill(self, pids: Sequence[int] = ()) -> bool:
        """Kill the process; return True if the command was still running."""
        alive = self._fork.is_alive()
        self._fork.kill()
        self._fork.join()
        return alive

    def ended(self) -> bool:
        """Return True if the command has ended with success, False if it still runs; raise an error if it failed."""
        if self._fork.is_alive():
            return False
        assert self._fork.exitcode == 0, Path(self.output.name).read_text()
        return True


def _be_run(folder: Path, words: list[str], output: str, environment: dict[str, str]) -> None:
    """Run the command in this process, which has been forked for it."""
    with Path(output).open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    os.environ |= {**environment, "FOUNDRY_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    os.chdir(folder)
    torch.set_num_threads(1)
    sys.argv = ["foundry", *words]
    runpy.run_module("foundry", run_name="__main__", alter_sys=True)


def use_server(port: int) -> None:
    """Let this process and its children use an S3 server on loopback, and create the bucket."""
    os.environ |= {
        "AWS_ACCESS_KEY_ID": "benchmark",
        "AWS_SECRET_ACCESS_KEY": "benchmark",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }
    import boto3  # type: ignore[import-untyped]

    boto3.client("s3").create_bucket(Bucket=BUCKET)


def killed_run(
    folder: Path, number: int, limit: int, rng: random.Random, seconds: tuple[float, float], count: Count
) -> Path:
    """Start, kill and restart a run until it is done or there were `limit` kills; return its run directory.

    Args:
        folder: working directory of the run.
        number: number of the run.
        limit: number of kills, over all runs.
        rng: source of the moments.
        seconds: duration of an undisturbed run, and of its training alone.
        count: counters, which are updated.
    """
    run_dir = folder / f"killed-{number}"
    words = [*words_of("lm", run_dir), f"checkpoint.mirror=s3://{BUCKET}/{run_dir.name}"]
    while True:
        life = ForkedLife(folder, words)
        count.starts += 1
        try:
            if count.kills < limit:
                killed = wait_and_kill(life, run_dir, MOMENTS[count.kills % len(MOMENTS)], rng, seconds)
            else:
                killed = False
                while not life.ended():
                    time.sleep(0.01)
        finally:
            life.kill()
            life.output.close()
        if not killed:
            return run_dir
        count.kills += 1
        restored = list_published(Store(f"s3://{BUCKET}/{run_dir.name}"))
        print(f"kill {count.kills}: the store has steps {restored}", file=sys.stderr)
        shutil.rmtree(run_dir, ignore_errors=True)


def measure_kills(options: Any) -> None:
    """Measure and record runs whose directory is deleted at each kill."""
    FORKS.set_forkserver_preload(["mirror", "foundry.engine.train", "foundry.commands.train", "s3fs"])
    rng, count, server = random.Random(options.seed), Count(), Server()
    use_server(server.server.server_port)
    differing, begin = 0, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mirror-") as temporary:
        folder = Path(temporary)
        (folder / "text.txt").write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(4000)))
        reference, seconds = undisturbed("lm", folder, ForkedLife)
        limit = 2 if options.smoke else options.kills
        while count.kills < limit:
            run_dir = killed_run(folder, count.runs, limit, rng, seconds, count)
            count.runs += 1
            differing += outcome(run_dir) != reference
    columns = [
        Column(key="runs", heading="runs"),
        Column(key="restarts", heading="restarts"),
        Column(key="differing", heading="runs with another end"),
        Column(key="copied", heading="copied, MB", format=",.1f"),
        Column(key="again", heading="copied twice, MB", format=",.3f"),
        Column(key="seconds", heading="seconds"),
    ]
    values: dict[str, Values] = {
        "runs": [count.runs],
        "restarts": [count.starts - count.runs],
        "differing": [differing],
        "copied": [server.copied_bytes / 1e6],
        "again": [server.again_bytes / 1e6],
        "seconds": [time.monotonic() - begin],
    }
    finish(
        options, name="mirror_kills", side="kills", columns=columns, rows=[Row(side=str(count.kills), values=values)]
    )


@contextmanager
def server_process() -> Iterator[int]:
    """Start an S3 server as another process, and yield its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    code = f"from moto.server import main; main(['-H', '127.0.0.1', '-p', '{port}'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while True:
            with socket.socket() as connection:
                if connection.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield port
    finally:
        process.kill()
        process.wait()


def save(checkpointer: Checkpointer, step: int, tensors: dict[str, Tensor]) -> float:
    """Save in the background; return the seconds that the calling thread waits."""
    checkpointer.write(step, tensors=lambda: tensors, manifest={}, rank_state={})
    checkpointer.join()
    return checkpointer.blocked_seconds


def checkpointers(folder: Path, stack: ExitStack) -> dict[str, Checkpointer]:
    """Return a saver without and one with a mirror, each with its own directory."""
    world = World.single(torch.device("cpu"))
    common: dict[str, Any] = {
        "model": nn.Module(),
        "asynchronous": True,
        "keep_last": 2,
        "keep_every_steps": None,
        "strict": True,
    }
    run_dir, plain, store = folder / "mirrored", folder / "plain", Store(f"s3://{BUCKET}/saves")
    plain.mkdir()
    assert lock(run_dir, stack)
    lease = Lease(store)
    lease.take()
    mirror = MainMirror(
        MirroredRun(store=store, run_dir=run_dir, world_size=1, seconds=60),
        MirrorState(run="saves"),
        lease,
        identity={"run.json": json.dumps({"run": "saves"}).encode()},
        keep_last=2,
        keep_every_steps=None,
    )
    mirror.start()
    stack.callback(mirror.close)
    return {
        "without a mirror": Checkpointer(plain, world, **common),
        "with a mirror": Checkpointer(run_dir, world, mirror=mirror, **common),
    }


def measure_saves(options: Any) -> None:
    """Measure and record how long the training thread waits in a save, with and without a mirror."""
    megabytes = 2 if options.smoke else options.megabytes
    tensors = {f"t{number}": torch.randn(megabytes * 2500) for number in range(100)}
    waits: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="mirror-") as temporary, server_process() as port, ExitStack() as stack:
        use_server(port)
        sides = checkpointers(Path(temporary), stack)
        for step in range(1, options.repeats + 2):
            names = list(sides) if step % 2 else list(sides)[::-1]
            for name in names:
                waits.setdefault(name, []).append(save(sides[name], step, tensors))
    columns = [
        Column(key="waits", heading="the training thread waits, s", format=".4f", spread=True),
        Column(key="delay", heading="delay by the mirror, s", format=".4f"),
    ]
    base = statistics.median(waits["without a mirror"][1:])
    rows = [
        Row(side=name, values={"waits": times[1:], "delay": [statistics.median(times[1:]) - base]})
        for name, times in waits.items()
    ]
    finish(options, name="mirror_saves", side="saves", columns=columns, rows=rows, notes=[f"{megabytes} MB per save."])


def main() -> None:
    """Run the measurement that the arguments choose."""
    cli = parser(__doc__)
    cli.add_argument("measurement", choices=("kills", "saves"))
    cli.add_argument("--kills", type=int, default=30)
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--megabytes", type=int, default=100)
    cli.add_argument("--repeats", type=int, default=10)
    options = cli.parse_args()
    {"kills": measure_kills, "saves": measure_saves}[options.measurement](options)


if __name__ == "__main__":
    main()
