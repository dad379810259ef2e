"""Runs of a vision-language model: samples, resume, initial weights, evaluation, questions and export."""

import json
import shutil

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from support.evaluated import evaluate
from support.reach import Reach

from foundry.commands.export import ExportOptions, export
from foundry.commands.library import compose, run
from foundry.commands.sample import SampleOptions, sample
from foundry.core.errors import ConfigError
from foundry.engine.restore import restore
from foundry.parts.model import build_model

SMALL = ["simulator=told", "data=scenes", "model=vlm", "objective=sft", "optimizer=adamw", "precision=fp32"]
SMALL += ["model.hidden_size=16", "model.intermediate_size=24", "model.num_layers=1", "model.num_heads=2"]
SMALL += ["model.num_kv_heads=2", "data.num_scenes=24", "data.held_out=0.25", "data.vocab_size=280"]
SMALL += ["hparams.global_batch_size=8", "hparams.per_gpu_batch_size=8", "objective.sample_tokens=4"]
SMALL += ["tracking=none", "hparams.lr=3e-3"]


class Told(Reach):
    """A simulator whose questions and answers name the position of the goal."""

    def describe(self, draw):
        side, height = ("left" if self._now.goal[0] < 0 else "right"), ("low" if self._now.goal[1] < 0 else "high")
        return [("which side ?", side), ("how high ?", height)]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A function that composes a run of four steps."""
    folder = tmp_path_factory.mktemp("pictures")
    (folder / "conf/simulator").mkdir(parents=True)
    own = "_target_: test_picture_runs.Told\nstate_dim: 4\naction_dim: 2\nimage_size: 16\nmax_steps: 30\n"
    (folder / "conf/simulator/told.yaml").write_text(own)
    words = [*SMALL, f"data.cache_dir={folder / 'cache'}"]
    return lambda *own: compose([*words, "hparams.max_steps=4", *own], config_dir=folder / "conf")


@pytest.fixture(scope="module")
def finished(settings, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run(settings("evaluation.interval=2 steps", "data.held_out=0.3"), run_dir)
    return run_dir


def weights(run_dir, out):
    export(ExportOptions(run=str(run_dir), out=str(out), trust=True))
    return load_file(out / "model.safetensors")


def test_vlm_run_draws_samples_and_measures_accuracy(finished):
    for name in ("samples.png", "samples_00000002.png", "samples_00000004.png"):
        with Image.open(finished / "plots" / name) as drawn:
            assert min(drawn.size) > 300
    lines = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    accuracies = [line["val_accuracy"] for line in lines if "val_accuracy" in line]
    assert len(accuracies) == 2
    assert all(0 <= accuracy <= 1 for accuracy in accuracies)


@pytest.mark.long
def test_resumed_vlm_run_ends_with_the_same_weights(settings, finished, tmp_path):
    own = ["evaluation.interval=2 steps", "data.held_out=0.3", "scheduler.horizon='4'"]
    run(settings(*own), tmp_path / "whole")
    run(settings(*own, "hparams.max_steps=2", "scheduler.horizon='4'"), tmp_path / "parts")
    run(settings(*own), tmp_path / "parts")
    whole, parts = (weights(tmp_path / name, tmp_path / f"{name}.out") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_init_from_loads_the_weights_of_a_vlm_run(settings, finished):
    from foundry.engine.initial_model import read_initial, resolve_weights
    from foundry.parallel.process_group import World
    from foundry.parts.model import start_model

    config = settings(f"model.init_from={finished}")
    world = World.single(torch.device("cpu"))
    initial = read_initial(
        config.model, resolve_weights(config.model), lambda node: start_model(config, node), world, "model.init_from"
    )
    found, expected = (
        initial.materialize().state_dict(),
        restore(finished, "last", ema=True, trust=True).model.state_dict(),
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    fresh = build_model(settings()).state_dict()
    assert not all(torch.equal(fresh[name], expected[name]) for name in expected)


def test_eval_of_a_vlm_run_reproduces_its_validation_loss(finished, tmp_path, monkeypatch):
    monkeypatch.setenv("FOUNDRY_CACHE", str(tmp_path / "cache"))
    found = evaluate(run=str(finished), out=str(tmp_path / "found.json"), max_new_tokens=4, trust=True)
    result = json.loads((finished / "result.json").read_text())
    assert found["loss"] == pytest.approx(result["val_loss"], rel=1e-6)
    assert 0 <= found["exact_match"] <= 1
    assert found["num_prompts"] == 7


def test_sample_answers_a_question_about_an_image(finished, tmp_path, capsys):
    Image.new("RGB", (40, 30), (9, 90, 9)).save(tmp_path / "a.png")
    asked = {"run": str(finished), "trust": True, "max_new_tokens": 4}
    out = str(tmp_path / "answer")
    file = sample(SampleOptions(**asked, prompt="which side ?", image=str(tmp_path / "a.png"), out=out))
    assert file == tmp_path / "answer.png"
    assert file.stat().st_size > 1000
    assert "user: which side ? assistant:\nanswer: " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="image: has no value, but the model requires an image"):
        sample(SampleOptions(**asked, prompt="which side ?"))
    with pytest.raises(ConfigError, match=r"image: is .*nothing\.png, which cannot be read as an image: No such file"):
        sample(SampleOptions(**asked, prompt="which side ?", image=str(tmp_path / "nothing.png")))


def test_vlm_export_has_weights_and_tokenizer_but_no_transformers_config(finished, tmp_path):
    exported = weights(finished, tmp_path / "out")
    expected = restore(finished, "last", ema=True, trust=True).model.state_dict()
    assert exported.keys() == expected.keys()
    assert all(torch.equal(exported[name], expected[name]) for name in expected)
    assert not (tmp_path / "out/config.json").exists()
    assert (tmp_path / "out/tokenizer.json").read_text() == (finished / "tokenizer.json").read_text()


def test_vlm_run_is_restored_without_its_scenes(finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run")
    restored = restore(tmp_path / "run", "last", ema=True, trust=True)
    assert len(restored.data.train) == 0
    assert restored.data.tokenizer.encode("which side ?").ids
