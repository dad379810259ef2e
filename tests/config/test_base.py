"""`model=base`: the composed model settings, and one-line errors at composition time."""

import os

import pytest
import yaml
from support.composition import configure
from support.tiny import SMALL_LM

from foundry.commands.library import compose
from foundry.config.record.frozen import save_config
from foundry.config.schemas.model import HuggingFace, Transformer
from foundry.core.errors import ConfigError

FEW = ["data.seq_len=32", "debug=fast"]


@pytest.fixture
def run_dir(tmp_path):
    """The parts of a run directory that composition reads: config.yaml, tokenizer.json and checkpoint names."""
    folder = tmp_path / "base"
    for step in (10, 20):
        (folder / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
        (folder / "checkpoints" / f"step_{step:08d}" / "manifest.json").touch()
    (folder / "checkpoints" / "latest").symlink_to("step_00000020")
    (folder / "tokenizer.json").write_text("{}")
    save_config(configure(*SMALL_LM, "data.vocab_size=300"), folder)
    return folder


def record(run_dir, **model):
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    settings["model"] |= model
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))


def refused(*overrides):
    with pytest.raises(ConfigError) as error:
        compose(["model=base", *overrides])
    return str(error.value)


def test_base_takes_model_weights_and_tokenizer_of_the_run(run_dir):
    config = compose(["model=base", f"model.path={run_dir}", *FEW])
    was = configure(*SMALL_LM, "data.vocab_size=300").model
    assert isinstance(config.model, Transformer)
    assert config.model.init_from == str(run_dir / "checkpoints" / "step_00000020")
    assert {**vars(config.model), "init_from": None} == vars(was)
    assert config.data.tokenizer == str(run_dir / "tokenizer.json")
    assert config.data.vocab_size == 300
    assert compose(["model=base", f"model.path={run_dir}", "model.which=10", *FEW]).model.init_from.endswith("10")
    (run_dir / "checkpoints" / "best").symlink_to("step_00000010")
    assert compose(["model=base", f"model.path={run_dir}", "model.which=best", *FEW]).model.init_from.endswith("10")


def test_base_keeps_explicit_tokenizer_and_vocab_size(run_dir, tmp_path):
    (tmp_path / "own.json").write_text("{}")
    own = ["data.vocab_size=280", f"data.tokenizer={tmp_path / 'own.json'}"]
    data = compose(["model=base", f"model.path={run_dir}", *own, *FEW]).data
    assert (data.vocab_size, data.tokenizer) == (280, str(tmp_path / "own.json"))


def test_base_on_a_transformers_folder_becomes_model_hf(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 320}')
    config = compose(["model=base", f"model.path={tmp_path}", *FEW])
    assert isinstance(config.model, HuggingFace)
    assert (config.model.path, config.model.vocab_size, config.model.init_from) == (str(tmp_path), 320, None)
    assert refused(f"model.path={tmp_path}", "model.which=best", *FEW).startswith(
        "model.which: is best but model.path is a transformers folder, which has no checkpoints"
    )
    assert refused(f"model.path={tmp_path}", "model.trust=true", *FEW).startswith("model.trust: ")


def test_base_on_a_huggingface_run_uses_the_copy_in_the_run_directory(run_dir, tmp_path):
    target = "foundry.models.pretrained.huggingface.HuggingFaceCausalLM"
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    settings["model"] = {"_target_": target, "path": str(tmp_path / "gone"), "vocab_size": 300, "max_seq_len": 32}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    message = refused(f"model.path={run_dir}", *FEW)
    assert message.startswith("model.path: ")
    assert "model.trust=true" in message
    (run_dir / "transformers").mkdir()
    model = compose(["model=base", f"model.path={run_dir}", *FEW]).model
    assert (model.path, model.init_from[-2:]) == (str(run_dir / "transformers"), "20")


@pytest.mark.parametrize(
    ("overrides", "start"),
    [
        ([], "model.path: has no value"),
        (["model.path=nowhere"], "model.path: is nowhere, which does not exist; give a run dir"),
        (["model.path=.."], "model.path: is .., which is neither a run directory"),
        (
            ["model.path=RUN", "model.which=best"],
            "model.which: is best but RUN has no checkpoint 'best'; available: st",
        ),
        (["model.path=RUN", "model.which=30"], "model.which: is 30 but RUN has no checkpoint '30'; available: step_0"),
        (["model.path=RUN", "model.init_from=x"], "model.init_from: is x but model=base loads its weights"),
        (["model.path=RUN", "model.hidden_size=64"], "model.hidden_size: is fixed by the base model and cannot be set"),
        (
            ["model.path=RUN", "+model.hidden_size=64"],
            "model.hidden_size: is fixed by the base model and cannot be set",
        ),
        (["model.path=RUN", "data.seq_len=64"], "data.seq_len: is 64 but the model of model.path=RUN has 32 positions"),
        (["model.path=RUN", "data.vocab_size=301"], "data.vocab_size: is 301 but the model of model.path=RUN has 300"),
        (["model.path=RUN", "model.which=null"], "model.which: cannot be null"),
    ],
)
def test_invalid_base_overrides_give_one_line_errors(run_dir, overrides, start):
    message = refused(*FEW, *(override.replace("RUN", str(run_dir)) for override in overrides))
    assert message.startswith(start.replace("RUN", str(run_dir)))
    assert "\n" not in message


def test_base_rejects_exported_adapters_without_base_weights(run_dir):
    (run_dir / "adapter_config.json").touch()
    message = refused(*FEW, f"model.path={run_dir}")
    assert message.startswith("model.path: is ")
    assert "which has adapters without their base model; give the run" in message


def test_base_rejects_an_image_model_for_text_data(run_dir):
    save_config(configure("hparams=diffusion", "model=dit", "data=digits", "objective=diffusion"), run_dir)
    (run_dir / "tokenizer.json").unlink()
    message = refused(*FEW, f"model.path={run_dir}")
    assert message == f"model.path: is {run_dir}, whose model is DiT, but the data is text; choose a language model"


def test_base_rejects_a_run_without_checkpoint_or_tokenizer(run_dir):
    (run_dir / "tokenizer.json").unlink()
    assert "has no regular file tokenizer.json" in refused(f"model.path={run_dir}", *FEW)
    (run_dir / "tokenizer.json").symlink_to("/etc/passwd")
    assert "has no regular file tokenizer.json" in refused(f"model.path={run_dir}", *FEW)
    for step in (10, 20):
        (run_dir / "checkpoints" / f"step_{step:08d}" / "manifest.json").unlink()
    assert refused(f"model.path={run_dir}", *FEW).endswith("available: none")


def test_base_errors_are_reported_with_other_config_errors(run_dir):
    message = refused(f"model.path={run_dir}", "model.which=best", "data=text", *FEW)
    assert [line.partition(":")[0] for line in message.splitlines()] == ["model.which", "data.path"]


@pytest.mark.parametrize(
    "model",
    [
        {"_target_": "os.system", "command": "true"},
        {"rope_theta": {"_target_": "os.system"}},
        {"rope_theta": "${oc.env:HOME}"},
        {"_args_": [1]},
    ],
)
def test_base_requires_trust_for_foreign_targets_in_a_run(run_dir, model):
    record(run_dir, **model)
    message = refused(f"model.path={run_dir}", *FEW)
    assert message.startswith("model.path: ")
    assert "trust=true" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    "model",
    [
        {"hidden_size": "???"},
        {"hidden_size": "${hparams.seed}"},
        {"hidden_size": []},
        {"unheard_of": 1},
        {"num_heads": 2**70},
        {"_target_": "???", "path": "x"},
    ],
)
def test_malformed_model_settings_of_a_run_give_a_one_line_error(run_dir, model):
    record(run_dir, **model)
    for trust in ("false", "true"):
        message = refused(f"model.path={run_dir}", f"model.trust={trust}", *FEW)
        assert message.startswith("model.path: ")
        assert "\n" not in message


@pytest.mark.parametrize("content", ["", "[]", "model: 3", "a: &x 1\nb: *x", "model: !!python/object:os.x {}", "\0"])
def test_invalid_config_yaml_of_a_run_gives_a_one_line_error(run_dir, content):
    (run_dir / "config.yaml").write_text(content)
    message = refused(f"model.path={run_dir}", *FEW)
    assert message.startswith("model.path: ")
    assert "\n" not in message


def test_base_does_not_block_on_a_fifo_as_config_yaml(run_dir):
    (run_dir / "config.yaml").unlink()
    os.mkfifo(run_dir / "config.yaml")
    assert refused(f"model.path={run_dir}", *FEW).startswith("model.path: ")


def test_base_accepts_a_custom_model_with_trust(run_dir):
    settings = yaml.safe_load((run_dir / "config.yaml").read_text())
    settings["model"] = {"_target_": "torch.nn.Linear", "in_features": 2, "out_features": 3}
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
    model = compose(["model=base", f"model.path={run_dir}", "model.trust=true", *FEW]).model
    assert model == settings["model"] | {"init_from": str(run_dir / "checkpoints" / "step_00000020")}
