"""Compilers that torch.compile needs, and warnings about graphs compiled during a run."""

import re
import shutil
import sys
from functools import partialmethod

import pytest
import torch
from support.tiny import TINY_DIT, TINY_LM
from torch import nn

from foundry.commands.library import compose, run
from foundry.core.errors import ConfigError
from foundry.parallel.compilation import compile_blocks, count_graphs, require_compiler
from foundry.training import compiling
from foundry.training.compiling import Recompilations


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    """Skip code generation, which takes long; the graphs are determined before it."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    monkeypatch.setenv("CXX", "true")  # Any program: no compiler is started.
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x)


@pytest.mark.parametrize(
    ("device", "variables", "programs", "missing"),
    [
        ("cpu", {}, {"g++"}, None),
        ("cpu", {}, {"gcc", "clang"}, "C++ compiler g++"),
        ("cpu", {"CXX": "/opt/g++ -m64"}, {"g++"}, "C++ compiler /opt/g++"),
        ("cuda", {}, {"clang"}, None),
        ("cuda", {}, {"gcc"}, None),
        ("cuda", {"CC": ""}, {"gcc"}, None),
        ("cuda", {}, {"g++"}, "C compiler gcc or clang"),
        ("cuda", {"CC": "ccache gcc"}, {"ccache"}, None),
        ("cuda", {"CC": "icx"}, {"gcc"}, "C compiler icx"),
    ],
)
def test_missing_compiler_of_the_device_is_a_config_error(monkeypatch, device, variables, programs, missing):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shutil, "which", lambda command: command if command in programs else None)
    if missing is None:
        require_compiler(torch.device(device))
        return
    with pytest.raises(ConfigError, match=rf"^hparams\.torchcompile: is true but there is no {re.escape(missing)} "):
        require_compiler(torch.device(device))


@pytest.mark.long
@pytest.mark.parametrize("parts", [TINY_LM, TINY_DIT])
def test_compiled_run_compiles_no_graph_after_its_first_steps(parts, tmp_path, caplog):
    before = 0 if "torch._dynamo" not in sys.modules else count_graphs()
    overrides = ["hparams.torchcompile=true", "hparams.max_steps=8", "evaluation.interval=4", "tracking=none"]
    run(compose([*parts, *overrides]), tmp_path / "run")
    assert count_graphs() > before
    assert "torch.compile has compiled" not in caplog.text


def logged(caplog):
    return [record.getMessage()[:42] for record in caplog.records if record.name == compiling.__name__]


def test_graphs_compiled_for_later_shapes_are_reported(caplog):
    block = Block()
    compile_blocks([block])
    recompilations = Recompilations(is_compiled=True)

    def step(*shape):
        with recompilations.around_step():
            block(torch.ones(*shape, 4))

    def warnings():
        recompilations.warn()
        return logged(caplog)

    for size in (2, 2, 3, 3):  # The second shape makes the size dynamic.
        step(size)
    assert warnings() == []
    step(3, 5)
    assert warnings() == ["torch.compile has compiled 1 more graph af"]
    step(3, 5)
    assert warnings() == ["torch.compile has compiled 1 more graph af"]
    step(3, 5, 6)
    assert warnings() == ["torch.compile has compiled 1 more graph af", "torch.compile has compiled 2 more graphs a"]


def test_run_without_compiled_blocks_counts_no_graphs(caplog):
    block = Block()
    compile_blocks([block])  # Compiled by other code.
    recompilations = Recompilations(is_compiled=False)
    for size in range(2, 8):
        with recompilations.around_step():
            block(torch.ones(*[1] * size, 4))
    recompilations.warn()
    assert logged(caplog) == []
