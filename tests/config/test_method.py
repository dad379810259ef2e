"""First log lines of a run: method hyperparameters, and a warning about a high learning rate."""

import json
import re

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from support.in_process import Commands
from support.tiny import SMALL_LM

from foundry.config.checks.method import describe_high_rate
from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_internals import load_unchecked, open_repository
from foundry.config.composition.hydra_versions import VERSION_BASE

TINY = [*SMALL_LM, "tracking=none", "objective=sft", "data=arithmetic", "data.num_rows=40", "data.seq_len=256"]
PLAN = "foundry.plan"


@pytest.fixture
def shell(tmp_path):
    return Commands(tmp_path, tmp_path / "cache")


def test_first_log_line_lists_the_method_hyperparameters(shell, tmp_path):
    _, said = shell(*TINY, "hydra.run.dir=run")
    (line,) = [line for line in said.splitlines() if "selects hparams" in line]
    brought = "objective=sft selects hparams=sft: optimizer=adamw, hparams.lr=2e-05, 16 samples a step, 5 steps"
    assert line.endswith(brought)
    assert brought in (tmp_path / "run" / "foundry.log").read_text().splitlines()[0]
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["global_batch_size"] == 16


def test_single_step_run_logs_step_in_singular(shell):
    output, said = shell(*TINY, "hparams.max_steps=1", "hydra.run.dir=run", "evaluation.interval=null")
    assert "16 samples a step, 1 step\n" in said
    assert re.search(r"length +1 step, 16 samples\n", output + said)


@pytest.mark.parametrize(
    "words",
    [["objective=next_token", "data.form=text"], pytest.param(["hparams=sft"], marks=pytest.mark.long)],
    ids=" ".join,
)
def test_no_method_line_for_default_or_explicit_hparams(shell, words):
    _, said = shell(*TINY, *words, module=PLAN)
    assert "selects hparams" not in said


@pytest.mark.parametrize(
    ("words", "warning"),
    [
        (["hparams.lr=2.1e-4"], "hparams.lr=0.00021 is 10 times the default of hparams=sft, 2e-05"),
        (["hparams.lr=2e-4"], None),
        (["hparams.lr=2e-3", "peft=lora"], None),
        (["hparams.lr=4e-3", "peft=lora"], "hparams.lr=0.004 is 20 times the default of hparams=sft, 0.0002"),
        (["hparams.lr=0.1", "optimizer=sgd"], None),
        (["hparams.lr=4e-2", "hparams=llm"], None),
        (
            ["hparams.lr=1e-2", "hparams=nemo_dpo"],
            "is 1,111 times the default of hparams=nemo_dpo, 9e-06",
        ),
        (
            ["hparams.lr=1e-2", "hparams=nemo_distillation"],
            "100 times the default of hparams=nemo_distillation",
        ),
        (["hparams.lr=2e-3", "hparams=megatron"], "20 times the default of hparams=megatron, 0.0001"),
    ],
)
def test_learning_rate_above_ten_times_the_default_warns(words, warning):
    install()
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        loader = GlobalHydra.instance().config_loader()
        composed = load_unchecked(loader, CONFIG_NAME, ["objective=sft", *words])
        repo, _ = open_repository(loader, None, [])
    said = describe_high_rate(composed, repo, composed.hydra.runtime.choices.hparams)
    assert (said is None) == (warning is None)
    assert warning is None or warning in said


def test_high_learning_rate_warning_is_printed_once(shell):
    _, said = shell(*TINY, "hparams.lr=1e-2", module=PLAN)
    assert said.count("is 500 times the default of hparams=sft, 2e-05") == 1
