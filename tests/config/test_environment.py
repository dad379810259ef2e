import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.composition import configure

from foundry.config.environment import detect, expand_hosts
from foundry.config.launch_variables import LaunchEnvironment
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
# Environment of the fourth of eight processes that mpirun started on two nodes, by Open MPI, and by MPICH or Intel MPI.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "MASTER_ADDR": "head",
}
INTEL_MPI = {
    "PMI_RANK": "3",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "3",
    "MPI_LOCALNRANKS": "4",
    "MASTER_ADDR": "head",
    "MASTER_PORT": "77",
}
# Environment of the second pod of a PyTorchJob with three pods.
PYTORCHJOB = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
# Environment of the second of two pods of a TrainJob.
TRAINJOB = {
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "job-node-0-0.job",
    "PET_MASTER_PORT": "29400",
}
SAGEMAKER = {"SM_HOSTS": '["algo-1","algo-2"]', "SM_CURRENT_HOST": "algo-2", "SM_NUM_GPUS": "8"}
NODE = LaunchEnvironment("kubeflow", 4, 0, 8, 4, 2, "job-node-0-0.job", 29400)
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
        pytest.param(OPEN_MPI, LaunchEnvironment("mpi", 3, 3, 8, 4, 2, "head"), id="Open MPI"),
        pytest.param(INTEL_MPI, LaunchEnvironment("mpi", 3, 3, 8, 4, 2, "head", 77), id="Intel MPI"),
        pytest.param(
            OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "4", "MASTER_ADDR": ""},
            LaunchEnvironment("mpi", 3, 3, 4, 4, 1),
            id="mpirun on one node",
        ),
        pytest.param(STEP_TASK | OPEN_MPI, LaunchEnvironment("mpi", 3, 3, 8, 4, 2, "head"), id="mpirun in srun"),
        pytest.param(
            STEP_TASK | {"PMI_RANK": "2", "PMI_SIZE": "4"},
            LaunchEnvironment("slurm", 2, 0, 4, 2, 2, "n1", PORT),
            id="srun --mpi=pmi2",
        ),
        pytest.param(
            OPEN_MPI | TORCHRUN, LaunchEnvironment("torchrun", 5, 1, 8, 4, 2, "host7", 1234), id="torchrun in mpirun"
        ),
        pytest.param(
            PYTORCHJOB, LaunchEnvironment("pytorchjob", 1, 0, 3, 1, 3, "job-master-0", 23456), id="PyTorchJob"
        ),
        pytest.param(
            TRAINJOB | PYTORCHJOB | {"WORLD_SIZE": "8"}, NODE, id="PyTorchJob with several processes in a pod"
        ),
        pytest.param(TRAINJOB, NODE, id="TrainJob"),
        pytest.param(TRAINJOB | {"PET_NNODES": "2:2"}, NODE, id="TrainJob with equal limits"),
        pytest.param(TRAINJOB | SAGEMAKER, NODE, id="Kubeflow before SageMaker"),
        pytest.param(
            TRAINJOB | TORCHRUN,
            LaunchEnvironment("torchrun", 5, 1, 8, 4, 2, "host7", 1234),
            id="torchrun in TrainJob",
        ),
        pytest.param(
            TRAINJOB | {"PET_MASTER_ADDR": "", "PET_MASTER_PORT": "", "MASTER_ADDR": "head"},
            LaunchEnvironment("kubeflow", 4, 0, 8, 4, 2, "head"),
            id="TrainJob with MASTER_ADDR",
        ),
        pytest.param(
            {"PET_NPROC_PER_NODE": "2"}, LaunchEnvironment("kubeflow", 0, 0, 2, 2, 1), id="torchrun's option alone"
        ),
        pytest.param({"PET_NNODES": "1", "PET_NODE_RANK": "0"}, SINGLE, id="TrainJob of one process"),
        pytest.param({"PET_MASTER_ADDR": "head", "PET_MAX_RESTARTS": "3"}, SINGLE, id="other options of torchrun"),
        pytest.param(SAGEMAKER, LaunchEnvironment("sagemaker", 8, 0, 16, 8, 2, "algo-1"), id="SageMaker"),
        pytest.param(
            SAGEMAKER | {"SM_NUM_GPUS": "0"},
            LaunchEnvironment("sagemaker", 1, 0, 2, 1, 2, "algo-1"),
            id="SageMaker without GPUs",
        ),
        pytest.param(
            {"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1", "SM_NUM_GPUS": "1"}, SINGLE, id="SageMaker of one"
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
        (TORCHRUN | {"MASTER_PORT": "0"}, "MASTER_PORT: '0' is not a port, which is between 1 and 65535: unset it"),
        (TRAINJOB | {"PET_MASTER_PORT": "65536"}, "PET_MASTER_PORT: '65536' is not a port, which is between 1 and"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: '0' must be at least 1: let the launcher set it"),
        (
            SUBMITIT_TASK | {"SUBMITIT_LOCAL_GLOBALID": "2"},
            "SUBMITIT_LOCAL_GLOBALID: '2' must be at least 0 and below 2, the number of processes",
        ),
        (
            STEP_TASK | {"SLURM_PROCID": "4"},
            "SLURM_PROCID: '4' must be at least 0 and below 4, the number of processes",
        ),
        (STEP_TASK | {"SLURM_STEP_NUM_NODES": "5"}, "SLURM_NNODES: '5' must be between 1 and 4, the number of tasks"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": ""}, "OMPI_COMM_WORLD_RANK: '3' is set but OMPI_COMM_WORLD_LOCAL_"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "8"}, "OMPI_COMM_WORLD_RANK: '8' must be at least 0 and below 8"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "9"}, "OMPI_COMM_WORLD_LOCAL_SIZE: '9' must be between 1 and OMPI_"),
        (
            OPEN_MPI | {"MASTER_ADDR": ""},
            "OMPI_COMM_WORLD_SIZE: '8' is more than the 4 on this node but MASTER_ADDR",
        ),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE: '2' is set but OMPI_COMM_WORLD_RANK is not"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK: '0' is set but MPI_LOCALRANKID is not: set the variables of"),
        (INTEL_MPI | {"MPI_LOCALNRANKS": ""}, "PMI_RANK: '3' is set but MPI_LOCALNRANKS is not: set the variables of"),
        (INTEL_MPI | {"PMI_SIZE": "many"}, "PMI_SIZE: 'many' is not an integer"),
        (INTEL_MPI | {"MPI_LOCALRANKID": "4"}, "MPI_LOCALRANKID: '4' must be at least 0 and below 4, the number of"),
        (PYTORCHJOB | {"RANK": "3"}, "RANK: '3' must be at least 0 and below 3, the number of pods"),
        (PYTORCHJOB | {"MASTER_PORT": ""}, "RANK: '1' is set but LOCAL_RANK is not"),
        (TRAINJOB | {"PET_NODE_RANK": ""}, "PET_NNODES: '2' is set but PET_NODE_RANK is not: set the variables of Kub"),
        (TRAINJOB | {"PET_MASTER_ADDR": ""}, "PET_NNODES: '2' is set but PET_MASTER_ADDR is not"),
        (
            TRAINJOB | {"PET_MASTER_ADDR": "", "PET_RDZV_ENDPOINT": "head:29400"},
            "PET_RDZV_ENDPOINT: 'head:29400' but foundry meets at PET_MASTER_ADDR: set that, or start with torchrun",
        ),
        (TRAINJOB | {"PET_NODE_RANK": "2"}, "PET_NODE_RANK: '2' must be at least 0 and below 2, the number of nodes"),
        (TRAINJOB | {"PET_NNODES": "1:4"}, "PET_NNODES: '1:4' is elastic: set one number, or start with torchrun"),
        (TRAINJOB | {"PET_NNODES": "0"}, "PET_NNODES: '0' is not a number of nodes: set it as in PET_NNODES=2"),
        (TRAINJOB | {"PET_NPROC_PER_NODE": "0"}, "PET_NPROC_PER_NODE: '0' must be at least 1: set a number, auto"),
        (TRAINJOB | {"PET_NPROC_PER_NODE": "all"}, "PET_NPROC_PER_NODE: 'all' is not an integer"),
        (SAGEMAKER | {"SM_HOSTS": ""}, "SM_CURRENT_HOST: 'algo-2' is set but SM_HOSTS is not"),
        (SAGEMAKER | {"SM_HOSTS": "algo-1"}, "SM_HOSTS: 'algo-1' is not a JSON list of hosts such as"),
        (SAGEMAKER | {"SM_HOSTS": "[1]"}, "SM_HOSTS: '[1]' is not a JSON list of hosts such as"),
        (SAGEMAKER | {"SM_CURRENT_HOST": "algo-3"}, "SM_CURRENT_HOST: 'algo-3' is not in SM_HOSTS="),
        (SAGEMAKER | {"SM_NUM_GPUS": "-1"}, "SM_NUM_GPUS: '-1' must be at least 0"),
        (STEP_TASK | {"SLURM_STEP_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST: 'n[1-' is not a node list"),
        (STEP_TASK | {"SLURM_STEP_NODELIST": "n[5-1]"}, "SLURM_JOB_NODELIST: 'n[5-1]' has an invalid range '5-1'; a"),
    ],
)
def test_contradictory_launcher_variables_are_reported(environ, message):
    with pytest.raises(ConfigError) as caught:
        detect(environ)
    assert str(caught.value).startswith(f"environment variable {message}")


@pytest.mark.parametrize(
    ("text", "gpus", "count"),
    [("auto", "", os.cpu_count()), ("auto", "0,1,2", 3), ("gpu", "0,1", 2), ("cpu", "0,1", os.cpu_count())],
)
def test_words_of_torchrun_count_the_processes_of_a_node(monkeypatch, text, gpus, count):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    environment = detect(TRAINJOB | {"PET_NPROC_PER_NODE": text})
    assert (environment.local_world_size, environment.world_size, environment.rank) == (count, 2 * count, count)
    assert environment.num_processes(1) == count


def test_gpu_as_number_of_processes_needs_a_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match="PET_NPROC_PER_NODE: 'gpu' but this node has no GPU: set a number, auto"):
        detect(TRAINJOB | {"PET_NPROC_PER_NODE": "gpu"})


@given(st.sampled_from([OPEN_MPI, INTEL_MPI, TRAINJOB, SAGEMAKER]), st.data())
def test_damaged_variables_give_one_line_that_names_a_variable(variables, data):
    key = data.draw(st.sampled_from(sorted(variables)))
    value = data.draw(st.none() | st.text(max_size=8) | st.integers(-2, 99).map(str))
    damaged = {name: text for name, text in variables.items() if name != key or value is not None}
    damaged |= {} if value is None else {key: value}
    environment, error = None, ""
    try:
        environment = detect(damaged)
    except ConfigError as caught:
        error = str(caught)
    if environment is None:
        assert re.match("environment variable (OMPI|PMI|MPI|PET|SM|MASTER)_[A-Z_]+: ", error)
        assert len(error.splitlines()) == 1
    else:
        assert 0 <= environment.local_rank < environment.local_world_size <= environment.world_size
        assert 0 <= environment.rank < environment.world_size
        assert environment.launcher != "single" or "PET_NNODES" in variables


@pytest.mark.parametrize(
    ("variables", "nproc_per_node", "message"),
    [
        (TRAINJOB, 4, None),
        (TRAINJOB, 2, "is 2 but the variables of kubeflow say 4 on this node; leave it out"),
        (SAGEMAKER, 2, "is 2 but the variables of sagemaker say 8 on this node; leave it out"),
        (OPEN_MPI, 2, "is 2 but mpi started 4 on this node; leave it out"),
    ],
)
def test_number_of_processes_is_set_once(monkeypatch, variables, nproc_per_node, message):
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    words = [f"distributed.nproc_per_node={nproc_per_node}", "hparams.global_batch_size=64"]
    if message is None:
        assert configure(*words, "hparams.per_gpu_batch_size=2").hparams.accum_freq == 4
        return
    with pytest.raises(ConfigError) as caught:
        configure(*words, "hparams.per_gpu_batch_size=2")
    assert str(caught.value) == f"distributed.nproc_per_node: {message}"


@pytest.mark.parametrize(
    ("variables", "launcher"), [(TRAINJOB, "kubeflow"), (OPEN_MPI, "mpi"), (PYTORCHJOB, "pytorchjob")]
)
def test_restarts_of_ranks_on_several_nodes_are_left_to_the_engine(monkeypatch, variables, launcher):
    for key, value in variables.items():
        monkeypatch.setenv(key, value)
    batch = ["hparams.global_batch_size=24", "hparams.per_gpu_batch_size=1"]
    with pytest.raises(ConfigError, match=rf"^distributed.max_restarts: is 3 but .* let {launcher} start all of them"):
        configure(*batch, "distributed.max_restarts=3")


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
