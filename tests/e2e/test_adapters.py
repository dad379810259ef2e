"""Runs with peft=lora: trained parameters, checkpoints, resume, adapters as a base, export."""

import json
import logging
import shutil
from dataclasses import replace

import pytest
import torch
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from support.composition import EQUAL_RATES, configure
from support.evaluated import evaluate
from support.samples import read_samples
from support.tiny import SMALL_LM, TINY_DIT
from transformers import AutoModelForCausalLM, AutoTokenizer

from foundry.checkpoint.folder import read_manifest
from foundry.commands.export import ExportOptions, export
from foundry.commands.sample import SampleOptions, sample
from foundry.core.errors import ConfigError
from foundry.engine.restore import restore
from foundry.engine.train import train
from foundry.models.lora import adapted_layers
from foundry.run_dir.checkpoints import find

QUIET = ["tracking=none", "tracking.progress=false", "evaluation.write_samples=false", "evaluation.interval=null"]
FEW = ["debug=fast", "data.seq_len=32", *QUIET]
LORA = ["peft=lora", "optimizer=adamw", "hparams.lr=0.02", "scheduler=constant", "hparams.max_steps=3"]
STILL = ["optimizer=adamw", "hparams.lr=1e-30", "optimizer.weight_decay=0", "hparams.max_steps=1"]
LONGER = ["hparams.max_steps=4", "checkpoint.scheduler_on_resume=config"]
LLAMA = ["model.qk_norm=false", "model.zero_init_outputs=false", *EQUAL_RATES]
TOKENS = torch.arange(24).view(1, 24)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The run directory of a tiny language model."""
    folder = tmp_path_factory.mktemp("base") / "base"
    train(configure(*SMALL_LM, *QUIET, *LLAMA, "hparams.lr=0.01", "hparams.max_steps=1"), folder)
    return folder


@pytest.fixture(scope="module")
def adapted(base, tmp_path_factory):
    """The run directory of LoRA adapters trained on `base`."""
    folder = tmp_path_factory.mktemp("adapted") / "adapted"
    train(on(base, "hparams.ema_decay=0.5", "peft.merge=true"), folder)
    return folder


def on(base, *overrides):
    return configure("model=base", f"model.path={base}", *FEW, *LORA, *overrides)


def logits(run):
    with torch.no_grad():
        return restore(run, "last", ema=True).model(TOKENS, return_logits=True).logits


def greedy(model, folder):
    """Return the greedy completion of a prompt by transformers' generate(), with the tokenizer of an export."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("def", return_tensors="pt", return_token_type_ids=False)
    found = model.eval().generate(**tokens, do_sample=False, max_new_tokens=24)[0]
    return tokenizer.decode(found, skip_special_tokens=True)


def sampled(run, out, **decoding):
    """Return the completion of the prompt `def` by foundry.sample; greedy without decoding options."""
    options = {"prompt": "def", "max_new_tokens": 24} | (decoding or {"temperature": 0})
    return read_samples(sample(SampleOptions(run=str(run), out=str(out), **options)))[0]


def saved(run):
    return {name: tensor for file in find(run).glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_lora_run_trains_and_saves_only_adapter_weights(base, adapted):
    tensors, manifest = saved(adapted), read_manifest(find(adapted))
    assert {name.split(".")[0] for name in tensors} == {"model", "ema", "optimizer"}
    assert all(".lora_A.default." in name or ".lora_B.default." in name for name in tensors)
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert manifest.base["path"] == str(find(base))
    assert (logits(adapted) - logits(base)).abs().max() > 0.01
    plan = json.loads((adapted / "plan.json").read_text())
    assert plan["adapters"][0] == "model.layers.0.self_attn.q_proj"
    assert len(plan["adapters"]) == 14
    assert plan["trainable_parameters"] == sum(t.numel() for name, t in tensors.items() if name.startswith("model."))


def test_resumed_lora_run_is_bit_identical_to_an_uninterrupted_run(base, tmp_path):
    overrides = ["hparams.max_steps=4", "peft.adapter_dropout=0.5", "hparams.ema_decay=0.9", "checkpoint.interval='2'"]
    train(on(base, *overrides), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half", symlinks=True)
    shutil.rmtree(find(tmp_path / "half"))  # the state after a kill between steps 2 and 4
    for name in ("status.json", "result.json", "checkpoints/latest", "checkpoints/best"):
        (tmp_path / "half" / name).unlink(missing_ok=True)
    train(on(base, *overrides), tmp_path / "half")
    one, other = saved(tmp_path / "whole"), saved(tmp_path / "half")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_missing_or_changed_base_of_adapters_is_a_config_error(base, tmp_path):
    own = shutil.copytree(base, tmp_path / "base", symlinks=True)
    train(on(own), tmp_path / "run")
    moved = own.rename(tmp_path / "moved")
    gone = r"adapters of the base .*/base/checkpoints/step_\d+, which no longer exists; restore it or a symlink to it"
    with pytest.raises(ConfigError, match="^run: leads to .*" + gone):
        restore(tmp_path / "run", "last", ema=True)
    with pytest.raises(ConfigError, match=r"^model\.init_from: leads to .*" + gone):
        train(configure("model=base", f"model.path={tmp_path / 'run'}", *FEW), tmp_path / "next")
    other = tmp_path / "other"
    train(configure(*SMALL_LM, *QUIET, *LLAMA, "hparams.seed=7", "hparams.max_steps=1"), other)
    with pytest.raises(ConfigError, match=r"^model\.init_from: differs from the base that the adapters of the checkpo"):
        train(on(other, *LONGER), tmp_path / "run")
    train(on(moved, *LONGER), tmp_path / "run")  # the same weights at another path
    shutil.rmtree(moved)
    other.rename(moved)
    with pytest.raises(ConfigError, match=r"adapters of a base with the digest \w+, but .* now has \w+; restore the w"):
        restore(tmp_path / "run", "last", ema=True)


def test_export_merges_adapters_by_peft_merge_or_by_its_merge_option(base, adapted, tmp_path):
    for name, merge in (("merged", None), ("adapters", False)):
        export(ExportOptions(run=str(adapted), out=str(tmp_path / name), merge=merge))
    assert (tmp_path / "adapters" / "adapter_config.json").exists()
    assert not (tmp_path / "merged" / "adapter_config.json").exists()
    name = "model.layers.0.self_attn.q_proj"
    layer = adapted_layers(restore(adapted, "last", ema=True).model)[name]
    update = layer.get_delta_weight("default")
    assert update.abs().max() > 1e-3
    merged = load_file(tmp_path / "merged" / "model.safetensors")[f"{name}.weight"]
    torch.testing.assert_close(merged, layer.base_layer.weight + update)


@pytest.mark.long
def test_lora_run_serves_as_base_of_full_and_lora_runs(adapted, tmp_path):
    expected = logits(adapted)
    train(configure("model=base", f"model.path={adapted}", *FEW, *STILL), tmp_path / "whole")
    train(on(adapted, *STILL), tmp_path / "second")
    train(on(tmp_path / "second", *STILL), tmp_path / "third")
    for name in ("whole", "second", "third"):
        torch.testing.assert_close(logits(tmp_path / name), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["foundry", "transformers"])
def test_peft_loads_exported_adapters_and_transformers_the_merged_model(base, adapted, tmp_path, kind):
    run, load = adapted, AutoModelForCausalLM.from_pretrained
    export(ExportOptions(run=str(base), out=str(tmp_path / "base")))
    if kind == "transformers":
        run = tmp_path / "run"
        train(on(tmp_path / "base", "peft.rslora=true", "peft.alpha=4", "peft.target_modules=[linear_qkv]"), run)
    export(ExportOptions(run=str(run), out=str(tmp_path / "adapter"), merge=False))
    export(ExportOptions(run=str(run), out=str(tmp_path / "merged"), merge=True))
    with torch.no_grad():
        merged = load(tmp_path / "merged").eval()(TOKENS).logits
        model = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter").eval()
        beside = model(TOKENS).logits
    torch.testing.assert_close(merged, logits(run), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(beside, logits(run), atol=1e-5, rtol=1e-5)
    text = sampled(run, tmp_path / "drawn")
    assert text != sampled(base, tmp_path / "of_base")
    assert greedy(model, tmp_path / "adapter") == text
    assert greedy(load(tmp_path / "merged"), tmp_path / "merged") == text
    one, other = (AutoTokenizer.from_pretrained(tmp_path / name) for name in ("adapter", "base"))
    assert (len(one), one.eos_token) == (len(other), other.eos_token)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == (str(tmp_path / "base") if kind == "transformers" else None)


@pytest.mark.long
def test_export_writes_a_merged_base_for_adapters_trained_on_adapters(adapted, tmp_path, capsys):
    """For example, adapters are trained by SFT, then other adapters on top of them by DPO."""
    train(on(adapted), tmp_path / "second")
    alone = ExportOptions(run=str(tmp_path / "second"), out=str(tmp_path / "alone"))
    export(alone)
    message = capsys.readouterr().err
    assert message.startswith("base: adapter_config.json names no model, because the base of these adapters is ")
    assert message.endswith(
        "; add base=DIR to write it as a transformers folder, or merge=true to merge the adapters into it\n"
    )
    assert message.count("\n") == 1
    assert "run=RUN out=DIR base=BASE` writes the folder BASE" in (tmp_path / "alone" / "README.md").read_text()

    export(replace(alone, out=str(tmp_path / "adapter"), base=str(tmp_path / "base")))
    assert capsys.readouterr().err == ""
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    assert f'from_pretrained("{tmp_path / "base"}")' in (tmp_path / "adapter" / "README.md").read_text()
    model = AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits, logits(tmp_path / "second"), atol=1e-5, rtol=1e-5)
        with model.disable_adapter():
            torch.testing.assert_close(model(TOKENS).logits, logits(adapted), atol=1e-5, rtol=1e-5)


def test_export_refuses_a_base_folder_that_is_unneeded_or_occupied(base, adapted, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for run, options, message in (
        (base, {"base": "b"}, r"^base: is b but .* has no adapters; leave it out$"),
        (
            adapted,
            {"base": "b", "merge": True},
            "^base: is b but the export is the base with merged adapters; leave it out$",
        ),
        (
            adapted,
            {"base": str(tmp_path / "full"), "merge": False},
            "^base: is .*, which exists and is not an empty folder",
        ),
        (
            adapted,
            {"base": str(tmp_path / "out"), "merge": False},
            "^base: is .*, the same folder as out; choose another folder$",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            export(ExportOptions(run=str(run), out=str(tmp_path / "out"), **options))
    assert not (tmp_path / "out").exists()


def test_lora_run_is_sampled_and_evaluated(base, adapted, tmp_path):
    drawn = sample(SampleOptions(run=str(adapted), prompt="def", max_new_tokens=4, out=str(tmp_path / "drawn")))
    assert read_samples(drawn)[0].startswith("def")
    likeliest = sampled(adapted, tmp_path / "likeliest")
    assert sampled(adapted, tmp_path / "first", top_k=1) == likeliest
    assert sampled(adapted, tmp_path / "nucleus", top_p=1e-6) == likeliest
    found = evaluate(run=str(adapted), out=str(tmp_path / "eval.json"), max_samples=4)
    assert 0 < found["loss"] < 20
    with pytest.raises(ConfigError, match=r"^merge: is True but .* has no adapters; leave it out$"):
        export(ExportOptions(run=str(base), out=str(tmp_path / "out"), merge=True))


@pytest.mark.long
def test_lora_tunes_and_merges_into_a_diffusion_model(tmp_path):
    train(configure(*TINY_DIT, *QUIET, "hparams.max_steps=1"), tmp_path / "base")
    overrides = ["hparams=diffusion", "debug=fast", "model=base", f"model.path={tmp_path / 'base'}", *TINY_DIT[5:]]
    adapters = ["peft=lora", "peft.target_modules=[linear_qkv,linear_fc1]", "optimizer=adamw", "hparams.max_steps=2"]
    train(configure(*overrides, *QUIET, *adapters), tmp_path / "run")
    assert len({name.rpartition(".lora_")[0] for name in saved(tmp_path / "run") if name.startswith("model.")}) == 4
    export(ExportOptions(run=str(tmp_path / "run"), out=str(tmp_path / "merged"), merge=True))
    names = load_file(tmp_path / "merged" / "model.safetensors").keys()
    assert names == restore(tmp_path / "base", "last", ema=True).model.state_dict().keys()


@pytest.mark.long
def test_lora_without_a_base_warns_and_cannot_be_a_base(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        train(configure(*SMALL_LM, *QUIET, *LORA, "hparams.max_steps=1"), tmp_path / "run")
    assert "peft=lora without a base" in caplog.text
    assert logits(tmp_path / "run").isfinite().all()
    with pytest.raises(ConfigError, match="that are in no file; export it with merge=true"):
        train(on(tmp_path / "run"), tmp_path / "next")
