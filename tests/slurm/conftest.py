"""A real Slurm of two nodes on the loopback interface, with its state in a temporary folder; one per test process.

Partition `urgent` preempts jobs of the other partitions: `main` requeues them, `spare` cancels them. A requeued job may
start after 7 seconds (cred_expire plus one) instead of the default two minutes.
"""

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest
from cluster import Cluster

_CONFIG = """
ClusterName=foundry
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
FirstJobId={first_job}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=6
CredType=cred/none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
ReturnToService=2
KillWait=5
MinJobAge=300
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[2]}] CPUs=4 RealMemory=8000 State=UNKNOWN
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=60 State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=20
PartitionName=spare Nodes=n[1-2] MaxTime=60 State=UP PriorityTier=1 PreemptMode=CANCEL GraceTime=0
PartitionName=urgent Nodes=n[1-2] MaxTime=60 State=UP PriorityTier=10 PreemptMode=OFF
"""


@pytest.fixture(scope="session")
def slurm(tmp_path_factory, worker_id):
    """Return the environment variables that `srun` needs to reach a running cluster."""
    for program in ("slurmctld", "slurmd", "srun"):
        if shutil.which(program) is None:
            pytest.skip(f"needs Slurm: {program} is not installed")
    if os.geteuid() != 0:
        pytest.skip("needs root, to run Slurm's daemons")
    folder = tmp_path_factory.mktemp("slurm")
    host = socket.gethostname()
    _name_nodes(host)
    for name in ("state", "n1", "n2"):
        (folder / name).mkdir()
    config = folder / "slurm.conf"
    process = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    ports = _neighbouring_ports(range(17801 + 100 * process, 17900 + 100 * process, 3))
    config.write_text(_CONFIG.format(host=host, folder=folder, ports=ports, first_job=1 + 10_000 * process))
    environment = {**os.environ, "SLURM_CONF": str(config)}
    daemons = [
        _start(["slurmctld", "-D", "-f", str(config)], folder / "slurmctld.out", environment),
        *[_start(["slurmd", "-D", "-N", n, "-f", str(config)], folder / f"{n}.out", environment) for n in ("n1", "n2")],
    ]
    try:
        _wait_until_idle(environment, folder)
        yield environment
    finally:
        for daemon in reversed(daemons):
            _stop(daemon)


def _name_nodes(host):
    """Add the host and both nodes to /etc/hosts, since Slurm and torch look hosts up by name."""
    hosts = Path("/etc/hosts")
    names = hosts.read_text().split()
    missing = [name for name in (host, "n1", "n2") if name not in names]
    with hosts.open("a") as file:
        file.writelines(f"127.0.0.1 {name}\n" for name in missing)


def _neighbouring_ports(candidates):
    """Return three consecutive free ports."""
    for first in candidates:
        sockets = [socket.socket() for _ in range(3)]
        try:
            for offset, listener in enumerate(sockets):
                listener.bind(("127.0.0.1", first + offset))
        except OSError:
            continue
        finally:
            for listener in sockets:
                listener.close()
        return first, first + 1, first + 2
    raise AssertionError("no free ports")


def _start(command, log, environment):
    with log.open("w") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment, start_new_session=True
        )


def _stop(daemon):
    """End a daemon. End nodes before the controller: without it they keep reporting the end of their last job."""
    daemon.terminate()
    try:
        daemon.wait(60)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _wait_until_idle(environment, folder):
    for _ in range(60):
        message = subprocess.run(
            ["sinfo", "-h", "-t", "idle", "-o", "%D"], env=environment, capture_output=True, text=True, check=False
        )
        if message.stdout.strip() == "2":
            return
        time.sleep(0.5)
    logs = "\n".join(path.read_text()[-2000:] for path in folder.glob("*.out"))
    raise AssertionError(f"the nodes did not become idle: {logs}")


@pytest.fixture
def cluster(slurm, cache, tmp_path):
    """The cluster, used from an empty folder; its queue is emptied after the test."""
    cluster = Cluster({**slurm, "FOUNDRY_CACHE": str(cache)}, tmp_path)
    yield cluster
    cluster.ask("scancel", "--user=root")
    cluster.ask("scontrol", "update", "nodename=n1,n2", "state=resume")
    for driver in cluster.drivers:
        driver.kill()
    while cluster.ask("squeue", "--noheader"):
        time.sleep(0.1)
