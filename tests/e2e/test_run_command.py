"""`run_command` gives the output of a separate process, after any number of commands in the test process."""

import logging
import os
import re
import signal
import sys
import threading
import warnings
from pathlib import Path

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from support.tiny import TINY_LM

RUN = [*TINY_LM, "tracking=none", "hparams.max_steps=3", "evaluation.write_samples=false"]
LIGHT = [
    ("foundry", ["--version"], 0),
    ("foundry", ["--help"], 0),
    ("foundry", ["--cfg", "job", "hparams.seed=3"], 0),
    ("foundry", ["hparams.leer=1", "scheduler=wds"], 2),
    ("foundry.report", ["dir=nowhere"], 2),
    ("foundry.diff", ["nowhere", "run"], 2),
]
"""Commands that import no torch."""
COMMANDS = [
    *LIGHT,
    ("foundry", ["--cfg", "job", "hparams.lr=-1"], 2),
    ("foundry", ["-m", "hparams.per_gpu_batch_size=16,7"], 2),
    ("foundry", [*RUN, "hydra.run.dir=run"], 0),
    ("foundry", [*RUN, "hydra.run.dir=run"], 0),
    ("foundry", [*RUN, "hydra.run.dir=run", "hparams.lr=2e-3"], 2),
    ("foundry", [*RUN, "hydra.run.dir=other", "hparams.lr=2e-3"], 0),
    ("foundry", [*RUN, "hydra.run.dir=fails", "hparams.lr=1e30", "scheduler.warmup=0", "optimizer=adamw"], 1),
    ("foundry.plan", [*RUN, "hydra.run.dir=plan"], 0),
    ("foundry.plan", [*RUN, "plan.evry=2"], 2),
    ("foundry.sample", ["run=run", "prompt='def main('", "max_new_tokens=8", "temperature=0", "out=drawn"], 0),
    ("foundry.sample", ["run=run", "labels=[3]"], 2),
    ("foundry.export", ["run=run", "out=exported"], 0),
    ("foundry.export", ["run=run", "out=exported"], 2),
    ("foundry.eval", ["run=run", "max_samples=8", "out=measured.json"], 0),
    ("foundry.diff", ["run", "other"], 1),
    ("foundry.sync", ["dir=run"], 0),
]


_TIMES = re.compile(r"\d[\d.,:]*[kM]? ?(?:ms|s|min|\w*/s)\b|(?<=ETA )\S+|(?<=after )\S+|\[[\d ,:-]+\]")
"""Durations, speeds and times of day."""


def answers(run, folder, commands):
    """Run the commands one after the other; return stdout and stderr of each, without the folder, times and speeds."""
    said = []
    for module, words, code in commands:
        streams = [text.replace(str(folder), "FOLDER") for text in run(*words, module=module, code=code)]
        said.append([_TIMES.sub("TIME", text) for text in streams])
    return said


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts)


@pytest.mark.long
def test_commands_in_one_process_print_the_output_of_cold_processes(run_command, cold_shell):
    assert answers(run_command, run_command.cwd, LIGHT) == answers(cold_shell.run, cold_shell.cwd, LIGHT)


@pytest.mark.long
def test_many_commands_in_one_process_match_separate_processes(tmp_path_factory, cache):
    from support.in_process import Commands
    from support.warm import WarmShell

    one, many, first = (tmp_path_factory.mktemp(name) for name in ("one", "many", "first"))
    WarmShell(first, cache).run(*RUN)  # trains the tokenizer of the shared cache
    ours = answers(Commands(one, cache), one, COMMANDS)
    theirs = answers(WarmShell(many, cache).run, many, COMMANDS)
    for command, mine, expected in zip(COMMANDS, ours, theirs, strict=True):
        assert mine == expected, command
    assert files(one) == files(many)


def process_state():
    """Return the process state that a command must restore."""
    loggers = [logging.root, *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    return {
        "hydra": GlobalHydra.instance().is_initialized(),
        "words": (list(sys.argv), Path.cwd(), dict(os.environ), list(sys.path)),
        "streams": (sys.stdout, sys.stderr),
        "handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
        "logging": [(logger.name, list(logger.handlers), logger.level) for logger in loggers if logger.handlers],
        "filters": list(warnings.filters),
        "random": torch.get_rng_state().tolist(),
        "torch": (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()),
    }


def threads():
    """Return the threads of the process, except tqdm's monitor, which the first progress bar starts for the process."""
    return {thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"}


@pytest.mark.parametrize(
    ("words", "code"),
    [(["hparams.lr=-1"], 2), ([*RUN, "hydra.run.dir=run", "hparams.deterministic=true"], 0)],
    ids=["refusal", "run"],
)
def test_run_command_restores_the_process_state(run_command, words, code):
    before, threads_before = process_state(), threads()
    run_command(*words, code=code, variables={"FOUNDRY_OTHER": "1"})
    after = process_state()
    assert {name: after[name] for name in before if after[name] != before[name]} == {}
    assert threads() <= threads_before  # threads of earlier tests may end meanwhile


def test_run_command_imports_the_module_of_the_current_folder(run_command):
    words = ["optimizer=sgd", "optimizer._target_=own.part", *RUN, "hydra.run.dir=run"]
    for text in ("one", "another"):  # of different length: Python identifies a source by size and second of change
        (run_command.cwd / "own.py").write_text(f"def part(*, model, lr, **rest):\n    raise ValueError('{text}')\n")
        _, stderr = run_command(*words[:-1], f"hydra.run.dir={text}", code=1, variables={"PYTHONPATH": "."})
        assert stderr.rstrip().endswith(f"ValueError: {text}")


def test_unexpected_exit_code_shows_the_output(run_command):
    with pytest.raises(AssertionError, match=r"exit code 2\n\nhparams\.lr: is -1 but must be above 0"):
        run_command("hparams.lr=-1")
