"""Runs under real agents of torchrun: their summary of a failure, and the loss of an agent."""

import json
import re
import sys
from pathlib import Path

import pytest
from support.outcome import outcome
from support.run_events import free_port
from support.tiny import TINY_LM

TESTS = str(Path(__file__).parents[1])
pytestmark = [pytest.mark.long, pytest.mark.distributed]
WORDS = ["--config-dir=conf", *(word for word in TINY_LM if not word.startswith("objective")), "objective=faulty"]
WORDS += ["hparams.global_batch_size=8", "hparams.per_gpu_batch_size=4", "hparams.max_steps=6", "distributed=ddp"]
WORDS += ["evaluation.interval=null", "evaluation.write_samples=false", "tracking.mlflow=false"]
WORDS += ["checkpoint.interval=1", "checkpoint.keep_last=10", "hydra.run.dir=run"]


@pytest.fixture
def start(cold_shell):
    """A function that starts an agent of torchrun for `python -m foundry` with a faulty objective."""
    folder = cold_shell.cwd / "conf" / "objective"
    folder.mkdir(parents=True)
    (folder / "faulty.yaml").write_text("_target_: support.faulty.Objective\n")
    agents = []

    def start_agent(*options, fault="nothing", rank="every"):
        variables = {"FAULT": fault, "FAULTY_RANK": rank, "PYTHONPATH": TESTS, "GLOO_SOCKET_IFNAME": "lo"}
        # Otherwise a later agent waits for an address that rank 0 published in the first round only (torch 2.13).
        variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [sys.executable, "-m", "torch.distributed.run", *options, "-m"]
        agents.append(cold_shell.start(*WORDS, variables=variables, command=command))
        return agents[-1]

    yield start_agent
    for agent in agents:
        agent.kill()
        agent.communicate()


def status(shell):
    return json.loads((shell.cwd / "run" / "status.json").read_text())


def test_summary_of_torchrun_shows_the_cause_in_the_words_of_foundry(start, cold_shell):
    agent = start("--nproc-per-node=2", f"--master-port={free_port()}", fault="fail", rank="1")
    stderr = agent.communicate(timeout=240)[1]
    root = stderr.partition("Root Cause (first observed failure):")[2]
    assert re.search(r"rank +: 1 .*\n +exitcode +: 1 ", root), stderr
    assert re.search(r"error_file: /.*error\.json\n +traceback : ValueError: first line\n", root), stderr
    assert "in fail" in root
    assert status(cold_shell)["reason"] == "rank 1 failed: ValueError: first line"


def test_run_goes_on_after_an_agent_was_killed_and_ends_with_the_same_weights(start, cold_shell, shell):
    rendezvous = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=7", "--max-restarts=3"]
    rendezvous += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1"]
    conf = "keep_alive_interval=1,keep_alive_max_attempt=3,is_host={}"
    host = start(*rendezvous, f"--rdzv-conf={conf.format(1)}")
    lost = start(*rendezvous, f"--rdzv-conf={conf.format(0)}", fault="kill_agent_once")
    assert lost.wait(timeout=240) == -9
    replacement = start(*rendezvous, f"--rdzv-conf={conf.format(0)}")
    (stdout, stderr), (other_stdout, other_stderr) = [agent.communicate(timeout=240) for agent in (host, replacement)]
    assert [host.returncode, replacement.returncode] == [0, 0], stderr + other_stderr
    assert re.search(r"^continues +after step [12]$", stdout + other_stdout, re.MULTILINE)
    assert status(cold_shell)["state"] == "finished"
    variables = {"FAULT": "nothing", "FAULTY_RANK": "every", "PYTHONPATH": TESTS}
    shell.run(*WORDS[:-1], "hydra.run.dir=undisturbed", "distributed.nproc_per_node=2", variables=variables)
    assert outcome(cold_shell.cwd / "run") == outcome(shell.cwd / "undisturbed")
