"""`python -m foundry` as two nodes or two ranks that an engine started, known from the engine's variables alone."""

import json

import pytest
from support.in_process import Commands
from support.run_events import free_port
from support.tiny import TINY_LM

WORDS = [*TINY_LM, "precision=fp32", "hparams.max_steps=2", "hparams.global_batch_size=8", "optimizer=adamw"]
WORDS += ["evaluation.interval=null", "evaluation.write_samples=false", "tracking.mlflow=false", "hydra.run.dir=run"]
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def open_mpi(index, port):
    keys = {"RANK": index, "SIZE": 2, "LOCAL_RANK": index, "LOCAL_SIZE": 2}
    return {f"OMPI_COMM_WORLD_{key}": str(value) for key, value in keys.items()} | {"MASTER_PORT": str(port)}


def open_mpi_on_two_nodes(index, port):
    return open_mpi(index, port) | {
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }


def intel_mpi(index, port):
    keys = {"PMI_RANK": index, "PMI_SIZE": 2, "MPI_LOCALRANKID": index, "MPI_LOCALNRANKS": 2, "MASTER_PORT": port}
    return {key: str(value) for key, value in keys.items()}


def pytorchjob(index, port):
    return {"RANK": str(index), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def kubeflow(index, port, per_node="1"):
    variables = {"NNODES": "2", "NPROC_PER_NODE": per_node, "NODE_RANK": str(index), "MASTER_ADDR": "127.0.0.1"}
    return {f"PET_{key}": value for key, value in variables.items()} | {"PET_MASTER_PORT": str(port)}


def kubeflow_with_two_ranks_per_node(index, port):
    return kubeflow(index, port, "2")


def sagemaker(index, port):
    hosts = ["localhost", "localhost."]  # two names of this machine
    variables = {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": hosts[index], "SM_NUM_GPUS": "0"}
    return variables | {"MASTER_PORT": str(port)}


def losses(folder):
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """Losses of a run in one process."""
    run_command = Commands(tmp_path_factory.mktemp("alone"), cache)
    run_command(*WORDS, "hparams.per_gpu_batch_size=8")
    return losses(run_command.cwd)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("engine", "launcher_ranks"),
    [
        (kubeflow_with_two_ranks_per_node, 4),
        *(
            pytest.param(engine, 2, marks=pytest.mark.long)
            for engine in (kubeflow, open_mpi, open_mpi_on_two_nodes, intel_mpi, pytorchjob, sagemaker)
        ),
    ],
)
def test_processes_of_an_engine_train_as_one_process_does(shell, alone, engine, launcher_ranks):
    port, words = free_port(), [*WORDS, f"hparams.per_gpu_batch_size={8 // launcher_ranks}"]
    processes = [shell.start(*words, variables=LOOPBACK | engine(index, port)) for index in range(2)]
    (stdout, stderr), (other_stdout, other_stderr) = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], stderr + other_stderr
    assert losses(shell.cwd) == pytest.approx(alone, rel=1e-5)
    assert json.loads((shell.cwd / "run" / "plan.json").read_text())["world_size"] == launcher_ranks
    assert [path.name for path in shell.cwd.iterdir()] == ["run"]
    assert "finished" in stdout
    assert (other_stdout, "Traceback" in stderr + other_stderr) == ("", False)


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "first", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"OMPI_COMM_WORLD_RANK": "1"},
        {"PET_NNODES": "1:2"},
        {"SM_HOSTS": "algo-1"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "none", "SLURM_NTASKS": "2"},
    ],
    ids=str,
)
def test_invalid_variables_of_an_engine_are_refused_in_one_line(run_command, variables):
    reports = {"TORCHELASTIC_ERROR_FILE": str(run_command.cwd / "error.json")}
    _, stderr = run_command(*WORDS, code=2, variables=variables | reports)
    assert stderr.startswith("environment variable ")
    assert stderr.count("\n") == 1
    (file,) = run_command.cwd.iterdir()
    assert json.loads(file.read_text())["message"]["message"] == stderr.rstrip("\n")


@pytest.mark.parametrize("node", [0, 1])
def test_each_node_refuses_a_run_directory_with_the_time(run_command, node):
    stderr = run_command(*WORDS[:-1], "hparams.per_gpu_batch_size=4", code=2, variables=kubeflow(node, 1))[1]
    assert stderr.startswith("hydra.run.dir: is runs/${now:")
    assert "each of the 2 nodes would insert its own time; set hydra.run.dir=PATH" in stderr
    assert stderr.count("\n") == 1
    assert list(run_command.cwd.iterdir()) == []


@pytest.mark.distributed
@pytest.mark.parametrize("failing_node", [0, pytest.param(1, marks=pytest.mark.long)])
def test_failure_on_one_node_has_its_own_exit_code_and_the_other_node_lost_a_rank(shell, failing_node):
    folder = shell.cwd / "conf" / "objective"
    folder.mkdir(parents=True)
    (folder / "faulty.yaml").write_text("_target_: support.faulty.Objective\n")
    port, rank = free_port(), 2 * failing_node + 1
    words = ["--config-dir=conf", *(word for word in WORDS if not word.startswith("objective")), "objective=faulty"]
    words += ["hparams.per_gpu_batch_size=2", "hparams.max_steps=5"]
    fault = LOOPBACK | {"FAULT": "fail", "FAULTY_RANK": str(rank)}
    nodes = [shell.start(*words, variables=fault | kubeflow(index, port, "2")) for index in range(2)]
    errors = [node.communicate(timeout=240)[1] for node in nodes]
    codes = [node.returncode for node in nodes]
    assert (codes[failing_node], codes[1 - failing_node]) == (1, 75), errors
    assert f"rank {rank} failed: ValueError: first line" in errors[failing_node]
    assert "another rank has ended" in errors[1 - failing_node]
    assert json.loads((shell.cwd / "run" / "status.json").read_text())["state"] == "failed"
    assert not (shell.cwd / "status.json").exists()
