import pytest
from support.composition import configure

from foundry.config.environment import LaunchEnvironment, detect, expand_hosts
from foundry.core.errors import ConfigError

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host7",
    "MASTER_PORT": "1234",
}
# Environment of a batch script of `sbatch -N2 --ntasks-per-node=2`: one process, although the job has four tasks.
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "31",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
# Environment of the third of four tasks that srun starts in this job; submitit sets the same variables.
STEP_TASK = BATCH_SCRIPT | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
}
# Environment of the second of two tasks of submitit's local executor.
SUBMITIT_TASK = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "20031",
    "SUBMITIT_LOCAL_NTASKS": "2",
    "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
    "SUBMITIT_LOCAL_NODEID": "0",
    "SUBMITIT_LOCAL_GLOBALID": "1",
    "SUBMITIT_LOCAL_LOCALID": "1",
}
SALLOC_SHELL = {
    key: BATCH_SCRIPT[key] for key in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_JOB_NODELIST")
}
SINGLE = LaunchEnvironment("single", 0, 0, 1, 1, 1)
PORT = 10_000 + 31 * 31


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        pytest.param({}, SINGLE, id="a shell"),
        pytest.param(TORCHRUN, LaunchEnvironment("torchrun", 5, 1, 8, 4, 2, "host7", 1234), id="torchrun"),
        pytest.param(
            STEP_TASK | TORCHRUN, LaunchEnvironment("torchrun", 5, 1, 8, 4, 2, "host7", 1234), id="torchrun in srun"
        ),
        pytest.param(
            {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
            LaunchEnvironment("torchrun", 1, 0, 2, 1, 2),
            id="one process per node",
        ),
        pytest.param(
            {"RANK": "0", "WORLD_SIZE": "1"}, LaunchEnvironment("torchrun", 0, 0, 1, 1, 1), id="torchrun of one"
        ),
        pytest.param(BATCH_SCRIPT, SINGLE, id="batch script"),
        pytest.param(BATCH_SCRIPT | {"SLURM_STEP_ID": str(2**32 - 5)}, SINGLE, id="batch script with its step number"),
        pytest.param(SALLOC_SHELL, SINGLE, id="salloc shell"),
        pytest.param(
            SALLOC_SHELL | {"SLURM_STEP_ID": str(2**32 - 6), "SLURM_PROCID": "0"}, SINGLE, id="interactive step"
        ),
        pytest.param(STEP_TASK, LaunchEnvironment("slurm", 2, 0, 4, 2, 2, "n1", PORT), id="srun or submitit"),
        pytest.param(
            STEP_TASK
            | {"SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
            | {"SLURM_PROCID": "1", "SLURM_STEP_NODELIST": "n2,n1"},
            LaunchEnvironment("slurm", 1, 0, 2, 1, 2, "n2", PORT + 3),
            id="a smaller step of a larger job",
        ),
        pytest.param(
            STEP_TASK | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_PROCID": "3"},
            LaunchEnvironment("slurm", 3, 0, 4, 1, 2, "n1", PORT),
            id="uneven nodes",
        ),
        pytest.param(
            STEP_TASK | {"MASTER_ADDR": "head", "MASTER_PORT": "77"},
            LaunchEnvironment("slurm", 2, 0, 4, 2, 2, "head", 77),
            id="a meeting place of the user's",
        ),
        pytest.param(
            SUBMITIT_TASK,
            LaunchEnvironment("submitit", 1, 1, 2, 2, 1, "127.0.0.1", 10_031),
            id="submitit without Slurm",
        ),
        pytest.param(
            STEP_TASK | SUBMITIT_TASK,
            LaunchEnvironment("submitit", 1, 1, 2, 2, 1, "127.0.0.1", 10_031),
            id="submitit without Slurm in srun",
        ),
        pytest.param(
            SUBMITIT_TASK | {"SUBMITIT_LOCAL_NTASKS": "1", "SUBMITIT_LOCAL_GLOBALID": "0"}, SINGLE, id="submitit's only"
        ),
        pytest.param(
            SUBMITIT_TASK | TORCHRUN,
            LaunchEnvironment("torchrun", 5, 1, 8, 4, 2, "host7", 1234),
            id="torchrun in submitit",
        ),
        pytest.param(
            STEP_TASK | SUBMITIT_TASK | {"SUBMITIT_EXECUTOR": "slurm"},
            LaunchEnvironment("slurm", 2, 0, 4, 2, 2, "n1", PORT),
            id="submitit's executor for Slurm",
        ),
        pytest.param(
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "31"}
            | {"SLURM_JOB_NODELIST": "x1"},
            LaunchEnvironment("slurm", 1, 1, 2, 2, 1, "x1", PORT),
            id="the older names only",
        ),
    ],
)
def test_detect_reads_ranks_and_rendezvous_from_launcher_variables(environ, expected):
    assert detect(environ) == expected


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"RANK": "1"}, "RANK: '1' is set but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "WORLD_SIZE: '4' is set but RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "4"}, "RANK: '0' is set but LOCAL_RANK is not"),
        (TORCHRUN | {"RANK": "8"}, "RANK: '8' must be at least 0 and below 8, the number of processes"),
        (
            TORCHRUN | {"LOCAL_RANK": "4"},
            "LOCAL_RANK: '4' must be at least 0 and below 4, the number of processes on this node",
        ),
        (TORCHRUN | {"WORLD_SIZE": "two"}, "WORLD_SIZE: 'two' is not an integer"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "16"}, "LOCAL_WORLD_SIZE: '16' must be between 1 and WORLD_SIZE=8"),
        (TORCHRUN | {"MASTER_PORT": "http"}, "MASTER_PORT: 'http' is not an integer"),
        (
            SUBMITIT_TASK | {"SUBMITIT_LOCAL_GLOBALID": "2"},
            "SUBMITIT_LOCAL_GLOBALID: '2' must be at least 0 and below 2, the number of processes",
        ),
        (
            STEP_TASK | {"SLURM_PROCID": "4"},
            "SLURM_PROCID: '4' must be at least 0 and below 4, the number of processes",
        ),
        (STEP_TASK | {"SLURM_STEP_NUM_NODES": "5"}, "SLURM_NNODES: '5' must be between 1 and 4, the number of tasks"),
        (STEP_TASK | {"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST: 'n[1-' is not a node list"),
    ],
)
def test_contradictory_launcher_variables_are_reported(environ, message):
    with pytest.raises(ConfigError) as caught:
        detect(environ)
    assert str(caught.value).startswith(f"environment variable {message}")


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("x1", ["x1"]),
        ("node[001-003,7],x1", ["node001", "node002", "node003", "node7", "x1"]),
        ("a[9-11]", ["a9", "a10", "a11"]),
        ("r[1-2]n[3,4]", ["r1n3", "r1n4", "r2n3", "r2n4"]),
        ("gpu-a,gpu-b[2].cluster", ["gpu-a", "gpu-b2.cluster"]),
    ],
)
def test_expand_hosts_parses_slurm_node_lists(nodelist, hosts):
    assert expand_hosts(nodelist) == hosts


def test_requeued_job_keeps_its_rendezvous_port_and_jobs_differ():
    first, again = detect(STEP_TASK), detect(STEP_TASK | {"SLURM_RESTART_COUNT": "2"})
    other = detect(STEP_TASK | {"SLURM_JOB_ID": "32"})
    assert (first.master_addr, first.master_port) == (again.master_addr, again.master_port)
    assert other.master_port != first.master_port
    assert all(
        1024 < detect(STEP_TASK | {"SLURM_JOB_ID": str(job)}).master_port < 32768 for job in range(0, 10**7, 9973)
    )


@pytest.mark.parametrize("method", ["env://", "tcp://node-1:29500", "tcp://[::1]:29500", "file:///shared/meet"])
def test_init_methods_env_tcp_and_file_are_accepted(method):
    assert configure(f"distributed.init_method='{method}'").distributed.init_method == method


@pytest.mark.parametrize(
    "method", ["env", "tcp://node-1", "tcp://node-1:port", "file://meet", "file:///", "http://a:1"]
)
def test_other_init_methods_are_refused(method):
    with pytest.raises(ConfigError, match=r"^distributed\.init_method: .*env://, tcp://HOST:PORT or file:///PATH"):
        configure(f"distributed.init_method='{method}'")
