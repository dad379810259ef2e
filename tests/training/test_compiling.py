"""When blocks are compiled during a run, and what is said of it."""

import logging
import re
import shutil
import sys
from functools import partialmethod

import pytest
import torch
from support.run_events import EndsAfter, Interrupted
from support.tiny import TINY_DIT, TINY_LM
from torch import nn

from foundry.commands.library import compose, run
from foundry.core.errors import ConfigError
from foundry.core.protocols import Window
from foundry.parallel.compilation import count_graphs, missing_compiler, require_compiler
from foundry.parallel.process_group import World
from foundry.training import compiling
from foundry.training.compiling import Compiling, Expected
from foundry.training.signals import Boundary

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _traced_only(monkeypatch):
    """Generating C++ would only take time; which graphs there are is decided before."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    monkeypatch.setenv("CXX", "true")  # any program: no compiler is started, and this machine may have none
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return x + self.linear(x)


def blocks():
    return [Block() for _ in range(2)]


def are_compiled(modules):
    return {module._compiled_call_impl is not None for module in modules}


def rank(number=0, device=CPU):
    return World(number, number, 2, 2, device)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.name == compiling.__name__]


def window(length=4):
    return Window([{"tokens": torch.zeros(2, length, dtype=torch.int64)}], 2)


def decide(choice, *, lengths=(4, 4, 4), step_seconds=1.0, steps_left=3000):
    """What is to be said after a first step and so many more."""
    with choice.around(window()):
        pass
    choice.after_log(100.0, steps_left)  # the first step's time is no step's
    for length in lengths:
        with choice.around(window(length)):
            pass
    choice.after_log(step_seconds, steps_left)
    return choice.flags


@pytest.mark.parametrize(
    ("steps_left", "step_seconds", "flag"),
    [(3000, 1.0, Boundary.COMPILE), (2400, 1.0, Boundary.EAGER), (10**6, 0.001, Boundary.EAGER)],
)
def test_it_pays_where_a_twentieth_of_the_steps_left_is_more_than_two_minutes(steps_left, step_seconds, flag, caplog):
    caplog.set_level(logging.INFO)
    choice = Compiling(wanted=None, blocks=blocks(), world=rank())
    assert decide(choice, steps_left=steps_left, step_seconds=step_seconds) == flag
    (line,) = said(caplog)
    assert f"{steps_left} more steps of {step_seconds:.3g} s" in line
    assert "compiling takes about 120 s" in line
    assert choice.flags == 0  # it is said once
    assert choice.state_dict() == {"compiled": None}  # until all ranks know


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"blocks": []}, "the model has none"),
        ({"world": rank(device=torch.device("meta"))}, "what it gives on meta is not known"),
        ({"obstacle": "each packed row would be compiled for itself"}, "each packed row"),
    ],
)
def test_what_would_not_be_compiled_well_is_not(options, reason, caplog):
    caplog.set_level(logging.INFO)
    choice = Compiling(**{"wanted": None, "blocks": blocks(), "world": rank()} | options)
    assert decide(choice, steps_left=10**9) == Boundary.EAGER
    assert reason in said(caplog)[0]


def test_samples_of_many_lengths_are_not_compiled_for(caplog):
    caplog.set_level(logging.INFO)
    choice = Compiling(wanted=None, blocks=blocks(), world=rank())
    assert decide(choice, lengths=(4, 5, 6), steps_left=10**9) == Boundary.EAGER
    assert "microbatches had 3 shapes" in said(caplog)[0]


def test_a_machine_without_a_compiler_is_named(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setenv("CXX", "no-such-compiler")
    choice = Compiling(wanted=None, blocks=blocks(), world=rank())
    assert decide(choice, steps_left=10**9) == Boundary.EAGER
    assert "no C++ compiler no-such-compiler" in said(caplog)[0]


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
def test_compiler_that_a_device_needs_is_looked_for(monkeypatch, device, variables, programs, missing):
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shutil, "which", lambda command: command if command in programs else None)
    assert missing_compiler(torch.device(device)) == missing
    if missing is None:
        require_compiler(torch.device(device))
        return
    with pytest.raises(ConfigError, match=rf"^hparams\.torchcompile: is true but there is no {re.escape(missing)} "):
        require_compiler(torch.device(device))


def test_other_ranks_do_as_rank_0_says_and_a_resumed_run_as_before():
    modules = blocks()
    other = Compiling(wanted=None, blocks=modules, world=rank(1))
    assert decide(other, steps_left=10**9) == 0
    other.obey(Boundary.SAVE)
    assert are_compiled(modules) == {False}
    other.obey(Boundary.COMPILE | Boundary.SAVE)
    assert are_compiled(modules) == {True}
    modules = blocks()
    resumed = Compiling(wanted=None, blocks=modules, world=rank())
    resumed.load_state_dict(other.state_dict())
    assert are_compiled(modules) == {True}
    resumed = Compiling(wanted=None, blocks=blocks(), world=rank())
    resumed.load_state_dict({"compiled": False})
    assert decide(resumed, steps_left=10**9) == 0


@pytest.mark.parametrize(("compiled_seconds", "stays"), [(0.9, True), (1.1, False)])
def test_steps_that_are_no_faster_are_compiled_no_longer(compiled_seconds, stays, caplog):
    caplog.set_level(logging.INFO)
    modules = blocks()
    choice = Compiling(wanted=None, blocks=modules, world=rank())
    choice.obey(decide(choice))
    for step_seconds in (50.0, compiled_seconds):  # graphs are made in the first steps
        for _ in range(4):
            with choice.around(window()):
                pass
        choice.after_log(step_seconds, 1000)
        choice.obey(choice.flags)
    assert are_compiled(modules) == {stays}
    assert choice.state_dict() == {"compiled": stays}
    times = f"a compiled step takes {compiled_seconds} s, and one before took 1 s"
    outcome = "stay compiled" if stays else "are no longer compiled"
    assert said(caplog)[1] == f"hparams.torchcompile=auto: {times}: blocks {outcome}"


def test_another_setting_outlives_what_was_decided():
    modules = blocks()
    Compiling(wanted=False, blocks=modules, world=rank()).load_state_dict({"compiled": True})
    assert are_compiled(modules) == {False}
    assert Compiling(wanted=True, blocks=modules, world=rank()).state_dict() == {"compiled": None}


@pytest.mark.long
@pytest.mark.parametrize("parts", [TINY_LM, TINY_DIT])
def test_a_normal_run_compiles_nothing_after_its_first_steps(parts, tmp_path, caplog):
    before = 0 if "torch._dynamo" not in sys.modules else count_graphs()
    overrides = ["hparams.torchcompile=true", "hparams.max_steps=8", "evaluation.interval=4", "tracking=none"]
    run(compose([*parts, *overrides]), tmp_path / "run")
    assert count_graphs() > before
    assert "torch.compile has compiled" not in caplog.text


def test_graphs_of_later_shapes_are_counted(caplog):
    modules = blocks()
    watch = Compiling(wanted=None, blocks=modules, world=rank())
    watch.obey(Boundary.COMPILE)
    for size in (2, 2, 3, 3):  # the second shape is one with a dynamic size
        with watch.around(window()):
            modules[0](torch.ones(size, 4))
    watch.after_log(1.0, 100)
    assert not said(caplog)
    with watch.around(window()):
        modules[0](torch.ones(size, 5, 4))
    watch.after_log(1.0, 100)
    watch.after_log(1.0, 100)
    assert [message[:42] for message in said(caplog)] == ["torch.compile has compiled 1 more graphs a"]


@pytest.mark.parametrize("pays", [pytest.param(True, marks=pytest.mark.long), False])
def test_a_run_decides_once_and_its_checkpoint_knows(pays, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(compiling.EXPECTED, "cpu", Expected(seconds=0.0 if pays else 1e9, saved=0.5))
    overrides = ["hparams.torchcompile=auto", "hparams.max_steps=12", "tracking.log_every_n_steps=2"]
    overrides += ["checkpoint.interval=8", "evaluation.interval=null", "tracking=none"]
    config = compose([*TINY_LM, *overrides])
    with pytest.raises(Interrupted):
        run(config, tmp_path / "run", observers=[EndsAfter(10)])
    run(config, tmp_path / "run")
    lines = said(caplog)
    assert lines[0].startswith(f"hparams.torchcompile=auto: blocks are {'' if pays else 'not '}compiled: ")
    is_done = "are compiled" if pays else "stay as they are"
    assert lines[-1:] == [f"hparams.torchcompile=auto: the blocks {is_done}, as before the run was resumed"]
