"""Listening sockets of all processes of a single-node run, from start to end."""

import os
import socket
import sys
import time
from collections import Counter
from ipaddress import ip_address
from pathlib import Path

import pytest
from support.tiny import TINY_LM

pytestmark = [
    pytest.mark.long,
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]
LISTENING, UNCONNECTED = "0A", "07"  # include/net/tcp_states.h


def family(pid):
    """Return the pids of a process and all its descendants."""
    found = [pid]
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [one for child in children.read_text().split() for one in family(int(child))]
        except OSError:  # the process has exited
            continue
    return found


def sockets(pid):
    """Return the inode numbers of the sockets of a process."""
    found = set()
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            name = str(descriptor.readlink())
        except OSError:
            continue
        if name.startswith("socket:["):
            found.add(name.removeprefix("socket:[").removesuffix("]"))
    return found


def address(text):
    """Parse an address from /proc/net: 32-bit words in native byte order."""
    overrides = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    return ip_address(b"".join(overrides))


def listening(pids):
    """Yield (protocol, address) of every socket of these processes that accepts connections or datagrams.

    Connected UDP sockets (libc opens them for name lookups) are excluded: they receive from their peer only.
    """
    own = set().union(*map(sockets, pids))
    for protocol in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{protocol}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in own and fields[3] == (UNCONNECTED if protocol.startswith("udp") else LISTENING):
                yield protocol, address(fields[1].split(":")[0])


def watched(process):
    """Poll a command until it exits; return its listening sockets, highest process count and number of polls."""
    seen, most, looks = Counter(), 0, 0
    while process.poll() is None:
        pids = family(process.pid)
        most, looks = max(most, len(pids)), looks + 1
        seen.update(set(listening(pids)))
        time.sleep(0.02)
    return seen, most, looks


@pytest.fixture
def start(shell):
    """A function that starts a run with overrides and environment variables; its process has the sockets of imports."""

    def start(*overrides, **variables):
        words = [*TINY_LM, "hparams.per_gpu_batch_size=2", "data.num_workers=1", "hydra.run.dir=run", *overrides]
        return shell.start(*words, variables=variables)

    return start


def test_listening_reports_sockets_on_all_interfaces():
    with socket.create_server(("", 0)), socket.create_server(("127.0.0.1", 0)):
        assert {str(where) for _, where in listening([os.getpid()])} >= {"0.0.0.0", "127.0.0.1"}


def test_two_local_ranks_listen_on_loopback_only(start):
    process = start("distributed=fsdp", "distributed.nproc_per_node=2")
    seen, most, looks = watched(process)
    assert process.returncode == 0, process.outputs()
    assert most >= 3
    assert looks > 20
    assert [where for where in seen if not where[1].is_loopback] == []
    # Only gloo listens (TCP): rendezvous uses a file, and no other server runs.
    assert {protocol for protocol, _ in seen} == {"tcp"}


def test_slurm_tasks_on_one_node_listen_on_loopback_only(start):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_STEP_NODELIST": socket.gethostname(), "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": str(port)}
    first, second = (start("distributed=fsdp", **step, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in ("0", "1"))
    seen, _, _ = watched(first)
    assert (first.returncode, second.wait(60)) == (0, 0), (first.outputs(), second.outputs())
    assert seen
    assert [where for where in seen if not where[1].is_loopback] == []
