"""Targets, interpolations and paths in the config of an untrusted run are not built, resolved or read."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from attacks import CANARY, SECRET, places, spoilt, targets
from safetensors.torch import load_file
from support.composition import configure
from transformers import AutoConfig, AutoModelForCausalLM

from foundry.commands.export import ExportOptions, export
from foundry.commands.sample import SampleOptions, draw
from foundry.config.command import command
from foundry.config.record.frozen import load_config
from foundry.engine.train import train

COMMANDS = {"sample": (SampleOptions, draw), "export": (ExportOptions, export)}


@pytest.fixture(autouse=True)
def secret(monkeypatch):
    monkeypatch.setenv(CANARY, SECRET)


@pytest.fixture
def ask(monkeypatch, capsys, tmp_path):
    """A function that runs a command in this process and returns (exit code, stdout, stderr)."""

    def ask(name, run_dir, *overrides):
        overrides = [f"run={run_dir}", *([f"out={tmp_path / 'out'}"] if name == "export" else []), *overrides]
        monkeypatch.setattr(sys, "argv", [name, *overrides])
        try:
            command(*COMMANDS[name], name=name, doc="")
            code = 0
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert SECRET not in out + err
        return code, out, err

    return ask


def settings_of(run_dir):
    return yaml.safe_load((run_dir / "config.yaml").read_text())


def write(run_dir, settings):
    (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("attack", targets(Path("x")))
def test_sample_and_export_reject_hostile_targets(lm, tmp_path, ask, name, attack):
    canary = tmp_path / "canary"
    place, change = next(places(targets(canary)[attack], attack))
    write(lm, spoilt(settings_of(lm), change))
    code, out, err = ask(name, lm)
    assert (code, out) == (2, ""), place
    assert all(line.startswith("run: ") and "trust=true" in line for line in err.splitlines())
    assert "model" in err
    assert not canary.exists()
    assert not (tmp_path / "out").exists()


def test_trust_builds_a_custom_target(lm, tmp_path, ask, monkeypatch):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "theirmodel.py").write_text(
        "from foundry.models.transformer import Transformer\n"
        "def make(**settings):\n"
        f"    open({str(tmp_path / 'canary')!r}, 'w')\n"
        "    return Transformer(**settings)\n"
    )
    settings = settings_of(lm)
    del settings["model"]["init_from"]
    settings["model"]["_target_"] = "theirmodel.make"
    write(lm, settings)
    assert ask("export", lm)[0] == 2
    code, _, err = ask("export", lm, "trust=true")
    assert (code, "theirmodel" in err, err.count("\n")) == (2, True, 1), "it cannot be imported yet"
    monkeypatch.syspath_prepend(str(tmp_path / "theirs"))
    assert ask("export", lm)[0] == 2
    assert not (tmp_path / "canary").exists()
    assert ask("export", lm, "trust=true")[0] == 0
    assert (tmp_path / "canary").exists()


ENVIRONMENT = f"${{oc.env:{CANARY}}}"


@pytest.mark.parametrize("trust", [(), ("trust=true",)])
@pytest.mark.parametrize("value", [f"${{oc.env:{CANARY},x}}", f"a ${{oc.decode:{ENVIRONMENT}}} b", "${hparams.seed}"])
@pytest.mark.parametrize("key", ["tracking.run_name", "model.init_from", "data.cache_dir", "hparams.lr", ENVIRONMENT])
def test_interpolations_in_run_settings_are_rejected(lm, tmp_path, ask, key, value, trust):
    settings = settings_of(lm)
    group, _, leaf = key.rpartition(".") if "$" not in key else ("tracking", "", key)
    settings[group][leaf] = value
    write(lm, settings)
    code, out, err = ask("export", lm, *trust)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert leaf in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "key", ["model.init_from", "data.cache_dir", "data.tokenizer", "objective.temperature", "hparams.lr"]
)
def test_environment_variables_in_part_settings_are_rejected(lm, tmp_path, ask, key):
    settings = settings_of(lm)
    group, _, leaf = key.rpartition(".")
    settings[group][leaf] = ENVIRONMENT
    write(lm, settings)
    code, _, err = ask("export", lm)
    assert (code, leaf in err, err.count("\n")) == (2, True, 1)
    assert not (tmp_path / "out").exists()


def test_export_keeps_secret_interpolations_unresolved(lm, tmp_path, ask):
    settings = settings_of(lm)
    settings["tracking"]["uri"] = ENVIRONMENT
    settings["tracking"]["run_name"] = f"http://me:{ENVIRONMENT}@host"
    write(lm, settings)
    for trust in ("false", "true"):
        code, _, err = ask("export", lm, f"trust={trust}", f"out={tmp_path / trust}")
        assert (code, err) == (0, "")
        text = (tmp_path / trust / "config.yaml").read_text()
        assert SECRET not in text
        assert yaml.safe_load(text)["tracking"] == settings["tracking"]


@pytest.mark.parametrize(
    "attention", ["evil/kernel", "kernels-community/flash-attn", {"": "evil/kernel"}, "evil", "/tmp/evil.py"]
)
def test_attention_kernels_from_a_hub_are_rejected(lm, ask, attention):
    settings = settings_of(lm)
    settings["model"] = {
        "_target_": "foundry.models.pretrained.huggingface.HuggingFaceCausalLM",
        "init_from": None,
        "path": None,
        "architecture": "llama",
        "config": {"attn_implementation": attention},
        "vocab_size": 512,
        "max_seq_len": 32,
        "init_std": None,
        "embedding_init_std": None,
    }
    write(lm, settings)
    code, _, err = ask("export", lm)
    assert (code, err.count("\n")) == (2, 1)
    assert "attn_implementation" in err


def test_transformers_folder_named_by_a_run_requires_trust(lm, tmp_path, ask):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": 512}))
    settings = settings_of(lm)
    settings["model"] = {
        "_target_": "foundry.models.pretrained.huggingface.HuggingFaceCausalLM",
        "path": str(folder),
        "vocab_size": 512,
        "max_seq_len": 32,
    }
    write(lm, settings)
    code, _, err = ask("export", lm)
    assert (code, err.count("\n")) == (2, 1)
    assert "trust=true" in err
    assert "model.path=" in err


def test_training_text_named_by_a_run_is_not_read(lm, tmp_path, ask):
    (tmp_path / "private.txt").write_text("private " * 10_000)
    settings = settings_of(lm)
    settings["data"] |= {
        "_target_": "foundry.data.corpora.text.text_files",
        "path": str(tmp_path / "private.txt"),
        "text_field": "text",
        "validation_path": None,
        "cache_dir": str(tmp_path / "cache"),
    }
    write(lm, settings)
    (lm / "tokenizer.json").unlink()
    code, _, err = ask("sample", lm)
    assert (code, err.count("\n")) == (2, 1)
    assert "tokenizer.json" in err
    assert not (tmp_path / "cache").exists()


def test_yaml_bombs_give_a_one_line_error(lm, ask):
    levels = "".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 12))
    bombs = [
        f"l0: &l0 [x, x]\n{levels}",
        "a: &a [*a]",
        "[" * 100_000,
        "{a: " * 100_000,
        "- " * 100_000,
        "? " * 100_000,
        "a: 1\n" * 2_000_000,
        f"hparams: {{seed: {'9' * 5000}}}",
        f"hparams: {{seed: 0x{'f' * 50000}}}",
        "a: !!python/object/apply:os.system [id]",
        "model: !!python/name:os.system",
    ]
    for bomb in bombs:
        (lm / "config.yaml").write_text(bomb)
        code, _, err = ask("sample", lm)
        assert (code, err.count("\n")) == (2, 1), bomb[:40]
        assert len(err) < 1000


def test_escape_sequences_in_setting_names_are_not_printed(lm, ask):
    settings = settings_of(lm)
    settings["\x1b]0;owned\x07"] = 1
    write(lm, settings)
    code, _, err = ask("sample", lm)
    assert (code, "\x1b" in err) == (2, False)


def test_older_configs_take_defaults_and_newer_ones_are_rejected(lm, ask):
    good = settings_of(lm)
    for group in ("guard", "tracking"):
        older = {name: node for name, node in good.items() if name != group}
        write(lm, older)
        assert ask("export", lm, f"out={lm / group}")[0] == 0
    older = json.loads(json.dumps(good))
    del older["model"]["logprob_tile_tokens"], older["distributed"]["timeout_seconds"]
    write(lm, older)
    assert load_config(lm) == load_config(shutil.copytree(lm, lm.parent / "same"))
    assert ask("export", lm)[0] == 0
    for group in ("model", "hparams", "guard"):
        write(lm, {**good, group: {**good[group], "of_the_future": 1}})
        code, _, err = ask("sample", lm)
        assert (code, "of_the_future" in err, err.count("\n")) == (2, True, 1)
    write(lm, {name: node for name, node in good.items() if name != "model"})
    assert "lacks model" in ask("sample", lm)[2]
    (lm / "config.yaml").unlink()
    assert "has no config.yaml" in ask("sample", lm)[2]


@pytest.mark.long
def test_run_from_a_transformers_folder_exports_without_the_folder(lm, tmp_path, ask):
    folder = tmp_path / "elsewhere"
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = AutoConfig.for_model("llama", vocab_size=4096, max_position_embeddings=32, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    shutil.copy(lm / "tokenizer.json", folder)
    overrides = ["model=hf", f"model.path={folder}", "debug=fast", "data.seq_len=32", "tracking=none"]
    train(configure(*overrides, "evaluation.write_samples=false", "tracking.progress=false"), tmp_path / "run")
    shutil.rmtree(folder)
    assert ask("export", tmp_path / "run")[0] == 0
    assert load_file(tmp_path / "out" / "model.safetensors").keys() >= {"model.embed_tokens.weight"}
    assert ask("sample", tmp_path / "run", "max_new_tokens=2")[0] == 0
    told = tmp_path / "run" / "transformers" / "config.json"
    told.write_text(json.dumps({**json.loads(told.read_text()), "attn_implementation": "evil/kernel"}))
    code, _, err = ask("sample", tmp_path / "run", "max_new_tokens=2")
    assert (code, "evil/kernel" in err, err.count("\n")) == (2, True, 1)
    shutil.rmtree(told.parent)
    assert ask("sample", tmp_path / "run", "max_new_tokens=2")[0] == 2
