"""The templates for SkyPilot and dstack on the page of engines are valid YAML, and their scripts train."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.run_events import free_port
from support.scripts import ROOT
from support.terminal import passed_on
from support.tiny import TINY_LM
from support.warm_python import WarmPython

from foundry.core.exit_codes import Retry, codes

PAGE = (ROOT / "docs" / "engines.md").read_text(encoding="utf-8")
SMALL = [*TINY_LM, "distributed=ddp", "hparams.max_steps=1", "hparams.global_batch_size=8", "checkpoint.interval=1"]
SMALL += ["hparams.per_gpu_batch_size=4", "evaluation.interval=null", "tracking.mlflow=false"]
SMALL += ["evaluation.write_samples=false"]
SKYPILOT = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
DSTACK = {"DSTACK_NODES_NUM": "2", "DSTACK_GPUS_PER_NODE": "1", "DSTACK_MASTER_NODE_IP": "127.0.0.1"}


def template(name):
    section = PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    return yaml.safe_load(re.search(r"^```yaml\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)[1])


def skypilot():
    task = template("SkyPilot")
    return task["num_nodes"], task["envs"], task["run"], SKYPILOT, "SKYPILOT_NODE_RANK"


def dstack():
    task = template("dstack")
    values = dict(line.split("=", 1) for line in task["env"])
    commands = [line for line in task["commands"] if not line.startswith("pip install")]
    return task["nodes"], values, "\n".join(commands), DSTACK, "DSTACK_NODE_RANK"


def test_skypilot_recovers_after_the_codes_that_are_worth_it():
    listed = template("SkyPilot")["resources"]["job_recovery"]["recover_on_exit_codes"]
    assert set(listed) < set(codes(Retry.yes, Retry.continues))
    assert set(listed) >= {74, 75, *codes(Retry.continues)}
    assert 137 not in listed


@pytest.fixture(scope="module")
def python():
    """Yield a folder of programs: the first process starts as in a terminal, later ones fork from a warm process."""
    with WarmPython() as programs:
        yield programs


@pytest.mark.long
@pytest.mark.distributed
@pytest.mark.parametrize("engine", [skypilot, dstack])
def test_script_of_a_template_trains_on_two_nodes(engine, python, tmp_path, cache):
    num_nodes, values, script, variables, rank = engine()
    assert num_nodes == 2
    own = {"FOUNDRY_CACHE": str(cache), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "MASTER_PORT": free_port()}
    own |= {"PATH": os.pathsep.join(map(str, [python.folder, Path(sys.executable).parent, os.environ["PATH"]]))}
    own |= values | variables | {"RUN_DIR": tmp_path / "run", "OVERRIDES": " ".join(SMALL)}
    nodes = [
        subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env={**passed_on(), **{key: str(value) for key, value in own.items()}, rank: str(node)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    output = [node.communicate(timeout=240)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], output
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["world_size"] == 2
    assert json.loads((tmp_path / "run" / "status.json").read_text())["state"] == "finished"
    assert (tmp_path / "run" / "checkpoints" / "latest").exists()
