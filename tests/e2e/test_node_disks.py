"""Runs of two nodes with local disks: the run directory has the same path, in two mount namespaces."""

import re
import shutil
import signal
import subprocess
import time

import pytest
from support.outcome import outcome, status
from support.run_events import free_port
from support.tiny import TINY_LM

from foundry.run_dir.checkpoints import list_checkpoints
from foundry.run_dir.mirror.snapshot import list_published
from foundry.run_dir.mirror.store import Store

pytestmark = [pytest.mark.long, pytest.mark.distributed]
WORDS = [*TINY_LM, "hparams.global_batch_size=8", "hparams.per_gpu_batch_size=4", "distributed=fsdp", "tracking=none"]
WORDS += ["tracking.log_every_n_steps=1", "evaluation.interval=null", "evaluation.write_samples=false"]
WORDS += ["checkpoint.every_minutes=null", "checkpoint.mirror_seconds=60"]


class Nodes:
    """Two nodes with a rank each, whose run directory `run` is the folder `disk0` or `disk1`."""

    def __init__(self, shell, url):
        self.shell, self.url, self.processes = shell, url, []
        self.disks = [shell.cwd / f"disk{n}" for n in (0, 1)]
        (shell.cwd / "run").mkdir()
        for disk in self.disks:
            disk.mkdir()

    def start(self, *words):
        port = str(free_port())
        self.processes = [self._start(rank, port, words) for rank in (0, 1)]

    def _start(self, rank, port, words):
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        variables |= {"GROUP_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables |= {"GLOO_SOCKET_IFNAME": "lo", "DISK": str(self.disks[rank]), "PLACE": str(self.shell.cwd / "run")}
        mirror = [] if self.url is None else [f"checkpoint.mirror={self.url}"]
        words = [*WORDS, *mirror, "hydra.run.dir=run", *words]
        return self.shell.start(*words, module="support.own_disk", variables=variables)

    def finish(self, code=0):
        """Wait for both nodes, and return their standard errors."""
        texts = [process.communicate(timeout=240)[1] for process in self.processes]
        assert [process.returncode for process in self.processes] == [code, code], "\n".join(texts)
        return texts

    def run(self, *words, code=0):
        self.start(*words)
        return self.finish(code)

    def kill_after(self, step):
        """Kill both nodes once the store has the checkpoint of a step or a later one; return the newest step there."""
        log, deadline = self.disks[0] / "foundry.log", time.monotonic() + 200
        while not any(
            int(n) >= step for n in re.findall(r"copied step (\d+) ", log.read_text() if log.exists() else "")
        ):
            assert all(process.poll() is None for process in self.processes), self.finish()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.kill()
        return list_published(Store(self.url))[0]

    def kill(self):
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
        for process in self.processes:
            process.communicate()

    def lose(self, *numbers):
        """Replace disks by empty ones."""
        for number in numbers:
            shutil.rmtree(self.disks[number])
            self.disks[number].mkdir()


@pytest.fixture
def start_nodes(shell):
    if subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode != 0:
        pytest.skip("only root can give two processes different disks")
    started = []

    def start(url):
        started.append(Nodes(shell, url))
        return started[-1]

    yield start
    for nodes in started:
        nodes.kill()


def shards(folder):
    return sorted(path.name for path in folder.glob("shard-*"))


@pytest.mark.timeout(1500)
def test_run_whose_nodes_lose_their_disks_ends_as_on_a_shared_disk(start_nodes, shell):
    lengths = ["hparams.max_steps=160", "checkpoint.interval=10"]
    ranks = "distributed.nproc_per_node=2"
    shell.run(*WORDS, *lengths, "checkpoint.mirror_seconds=30", ranks, "hydra.run.dir=shared")
    nodes = start_nodes(f"file://{shell.cwd}/store")
    begin = 10
    for lost in ([1], [0], [0, 1], []):
        nodes.start(*lengths)
        newest = nodes.kill_after(begin)
        assert newest < 160
        nodes.lose(*lost)
        begin = newest + 10
    errors = nodes.run(*lengths)
    assert "the nodes have local disks" in errors[0]
    assert "Traceback" not in errors[0] + errors[1]
    first, second = nodes.disks
    assert outcome(first) == outcome(shell.cwd / "shared")
    names = [folder.name for folder in list_checkpoints(shell.cwd / "shared")]
    kept = [[folder.name for folder in list_checkpoints(disk)] for disk in nodes.disks]
    assert kept[0] == kept[1]
    assert kept[0][:2] == names
    assert len(kept[0]) <= 3  # one more if the last save found it being copied
    for number, disk in enumerate(nodes.disks):
        assert shards(disk / "checkpoints" / names[0]) == [f"shard-0000{number}.safetensors"]
    assert not (second / "metrics.jsonl").exists()
    assert list_published(Store(nodes.url)) == [160, 150]


def test_checkpoint_that_one_node_has_not_copied_is_not_used_if_the_disks_are_lost(start_nodes, shell):
    lengths = ["hparams.max_steps=12", "checkpoint.interval=4"]
    nodes = start_nodes(f"file://{shell.cwd}/store")
    nodes.run(*lengths)
    expected = outcome(nodes.disks[0])
    store = Store(nodes.url)
    for is_lost in (True, False):
        place = "checkpoints/step_00000012"  # as if the nodes were killed between their copies
        (shard,) = (name for name in store.sizes(place) if name.startswith("shard-00001"))
        store.remove(f"{place}/published.json", f"{place}/{shard}")
        store.write(f"{place}/begun.json", b'{"id": "0", "manifest": "0"}')
        if is_lost:
            nodes.lose(0, 1)
            assert "restored step 8 of the run" in nodes.run(*lengths)[0]
        else:
            assert "restored" not in nodes.run(*lengths)[0]
        assert outcome(nodes.disks[0]) == expected
        assert list_published(store) == [12, 8]


def test_run_of_two_nodes_continues_on_one_of_them_with_one_rank(start_nodes, shell):
    lengths, stop = ["hparams.max_steps=8", "checkpoint.interval=4"], "hparams.max_minutes=1e-9"
    shell.run(*WORDS, *lengths, stop, "distributed.nproc_per_node=2", "hydra.run.dir=shared")
    shell.run(*WORDS, *lengths, "distributed=none", "hydra.run.dir=shared")
    nodes = start_nodes(f"file://{shell.cwd}/store")
    nodes.run(*lengths, stop)
    (shell.cwd / "run").rmdir()
    nodes.disks[1].rename(shell.cwd / "run")  # has no small files
    words = [f"checkpoint.mirror={nodes.url}", "distributed=none", "hydra.run.dir=run"]
    _, error = shell.run(*WORDS, *lengths, *words)
    assert "restored step" in error
    assert outcome(shell.cwd / "run") == outcome(shell.cwd / "shared")
    assert status(shell.cwd / "run")["state"] == "finished"


def test_nodes_with_local_disks_are_refused_without_a_mirror(start_nodes, shell):
    nodes = start_nodes(None)
    for error in nodes.run("hparams.max_steps=4", code=2):
        assert error == (
            f"hydra.run.dir: is {shell.cwd}/run, but on the node of rank 1 this path is on a local disk; "
            "choose a folder that all nodes share, or set checkpoint.mirror=URL\n"
        )
    assert [list(disk.iterdir()) for disk in nodes.disks] == [[], []]
