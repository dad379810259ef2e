"""Runs of a vision-language-action policy: initial weights, tokenizer, refusals, evaluation, export and resume."""

import json
import shutil
import signal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.evaluated import evaluate

from foundry.checkpoint.init_from import init_from
from foundry.commands.export import ExportOptions, export
from foundry.commands.library import compose, run
from foundry.commands.sample import SampleOptions, sample
from foundry.core.errors import ConfigError
from foundry.data.corpora.tokenizer import train_tokenizer
from foundry.engine.restore import restore
from foundry.parallel.process_group import World

ALONE = World.single(torch.device("cpu"))
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2}
BACKBONE = [f"model.backbone.{name}={size}" for name, size in SIZES.items()]
QUIET = ["tracking=none", "tracking.progress=false"]
BATCH = ["hparams.global_batch_size=16", "hparams.per_gpu_batch_size=16"]
SMALL = ["experiment=vla_touch", "simulator=commanded", "simulator.image_size=16", *BACKBONE, *QUIET, *BATCH]
SMALL += [
    "model.intermediate_size=48",
    "data.episodes=8",
    "data.noise=0.02",
    "data.held_out=0.3",
    "hparams.max_steps=4",
]
SMALL += ["evaluation.evaluators.success.episodes=3", "evaluation.evaluators.success.at_a_time=2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a config directory that defines the user's own simulator."""
    made = tmp_path_factory.mktemp("vla")
    (made / "conf/simulator").mkdir(parents=True)
    own = "_target_: support.commanded.Commanded\nstate_dim: 4\naction_dim: 2\nimage_size: null\nmax_steps: 30\n"
    (made / "conf/simulator/commanded.yaml").write_text(own)
    return made


@pytest.fixture(scope="module")
def settings(folder):
    return lambda *words: compose([*SMALL, f"data.cache_dir={folder / 'cache'}", *words], config_dir=folder / "conf")


@pytest.fixture(scope="module")
def vlm(folder):
    """The run of a small vision-language model on images of the simulator `commanded`."""
    words = ["experiment=vlm_scenes", "simulator=commanded", "simulator.image_size=16", "data.num_scenes=24", *QUIET]
    words += [f"model.{name}={size}" for name, size in SIZES.items()] + ["data.seq_len=64", "data.vocab_size=290"]
    words += [*BATCH, "hparams.max_steps=3", "evaluation.interval=null", f"data.cache_dir={folder / 'cache'}"]
    run(compose(words, config_dir=folder / "conf"), folder / "vlm")
    return folder / "vlm"


@pytest.fixture(scope="module")
def finished(settings, vlm, folder):
    """A run whose backbone started from `vlm`."""
    run(settings(f"model.backbone.init_from={vlm}"), folder / "run")
    return folder / "run"


def weights(run_dir):
    with safe_open(run_dir / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # not a mapping


@pytest.mark.long
def test_vla_backbone_init_from_a_run_takes_its_weights_and_tokenizer(settings, vlm, tmp_path):
    config = settings(
        f"model.backbone.init_from={vlm}", "hparams.lr=1e-30", "scheduler.min_lr=0", "hparams.max_steps=1"
    )
    assert config.data.tokenizer == str(vlm / "tokenizer.json")
    assert config.data.vocab_size == config.model.backbone.vocab_size == 290
    run(config, tmp_path / "run")
    assert (tmp_path / "run/tokenizer.json").read_text() == (vlm / "tokenizer.json").read_text()
    found = restore(tmp_path / "run", "last", ema=False, trust=True).model.backbone.state_dict()
    expected = restore(vlm, "last", ema=True, trust=True).model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_vla_backbone_without_init_from_trains_its_own_tokenizer(settings):
    config = settings()
    assert config.data.tokenizer is None
    assert config.data.vocab_size == config.model.backbone.vocab_size == 4096


def as_file(vlm, folder, change=None):
    state = restore(vlm, "last", ema=True, trust=True).model.state_dict()
    folder.mkdir()
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    shutil.copy(vlm / "tokenizer.json", folder / "tokenizer.json")
    return folder / "model.safetensors"


@pytest.mark.long
def test_vla_backbone_init_from_a_file_takes_its_weights_and_tokenizer(settings, vlm, tmp_path):
    file = as_file(vlm, tmp_path / "file")
    config = settings(f"model.backbone.init_from={file}", "data.vocab_size=290", "hparams.max_steps=1")
    assert config.data.tokenizer == str(file.with_name("tokenizer.json"))
    run(config, tmp_path / "run")
    found = restore(tmp_path / "run", "last", ema=False, trust=True).model.backbone.model.norm.weight
    assert torch.equal(found, restore(vlm, "last", ema=True, trust=True).model.model.norm.weight)  # frozen in training


def test_vla_backbone_weights_of_another_size_are_refused(settings, vlm, tmp_path):
    file = as_file(vlm, tmp_path / "file")
    wrong = settings(f"model.backbone.init_from={file}", "data.vocab_size=290", "model.backbone.intermediate_size=40")
    with pytest.raises(ConfigError, match=r"model\.backbone\.init_from: does not fit the model: it has .* instead of"):
        run(wrong, tmp_path / "of_file")
    wrong = settings(f"model.backbone.init_from={vlm}", "model.backbone.num_layers=1")
    with pytest.raises(ConfigError, match=r"model\.backbone\.init_from: is .*/vlm: "):
        run(wrong, tmp_path / "of_run")


def test_vla_backbone_refuses_another_tokenizer(settings, vlm, tmp_path):
    train_tokenizer(["go to the left", "go to the right"], 280).save(str(tmp_path / "tokenizer.json"))
    words = [f"model.backbone.init_from={vlm}", f"data.tokenizer={tmp_path / 'tokenizer.json'}"]
    message = r"data\.tokenizer: differs from the tokenizer that the weights in .*/vlm were trained with; set .*=.*/vlm"
    with pytest.raises(ConfigError, match=message):
        run(settings(*words), tmp_path / "run")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.backbone.init_from=/nowhere"], "model.backbone.init_from: is /nowhere, which does not exist"),
        (
            ["model.backbone.init_from=VLM", "peft=lora"],
            "model.backbone.init_from: is VLM but peft=lora saves only adapters",
        ),
        (["data.instruction_tokens=null"], "data.instruction_tokens: is null but model VLA reads instructions"),
        (["simulator.image_size=null"], "data.image_size: is null but model VLA needs images; set simulator"),
        (["model.backbone.num_images=2"], "model.backbone.num_images: is 2 but must be data.num_observations=1"),
        (["model.backbone.image_size=24"], "model.backbone.image_size: is 24 but must be data.image_size=16; leave"),
        (
            ["model.backbone.num_heads=5"],
            "model.backbone.num_heads: is 5 but must divide model.hidden_size=32",
        ),
        (
            ["model.backbone.max_seq_len=3"],
            "model.backbone.max_seq_len: is 3 but must be at least data.",
        ),
        (
            ["evaluation.evaluators.success.instruction=no"],
            "evaluation.evaluators.success.instruction: is no but must be",
        ),
    ],
)
def test_inconsistent_vla_settings_are_refused(words, message, settings, vlm):
    words = [word.replace("VLM", str(vlm)) for word in words]
    with pytest.raises(ConfigError) as refused:
        settings(*words)
    assert message.replace("VLM", str(vlm)) in str(refused.value)


def test_instruction_tokens_are_refused_for_a_model_without_instructions(folder):
    own = [word for word in SMALL if not word.startswith("model.")]
    with pytest.raises(
        ConfigError, match=r"data\.instruction_tokens: is 24 but model PolicyDiT does not read instructions; "
    ):
        compose([*own, "model=policy_dit", "model.patch_size=4"], config_dir=folder / "conf")


def test_instruction_longer_than_instruction_tokens_is_refused(settings, tmp_path):
    with pytest.raises(ConfigError, match=r"data\.instruction_tokens: is 2 but go to the \w+ has \d tokens; set it to"):
        run(settings("data.instruction_tokens=2"), tmp_path / "run")


@pytest.mark.long
def test_eval_of_a_vla_run_needs_no_demonstrations_and_no_backbone_run(finished, folder, tmp_path):
    gone = {name: folder / name for name in ("cache", "vlm")}
    for name, path in gone.items():
        path.rename(tmp_path / name)
    try:
        found = evaluate(run=str(finished), trust=True, out=str(tmp_path / "own.json"))
        result = json.loads((finished / "result.json").read_text())
        assert found["success"] == result["val_success"]
        other = evaluate(
            run=str(finished),
            trust=True,
            instruction="other",
            record=str(tmp_path / "films"),
            out=str(tmp_path / "other.json"),
        )
        assert other["instruction"] == "other"
        lines = [json.loads(line) for line in (tmp_path / "films/rollouts.jsonl").read_text().splitlines()]
        instructions = {(one["instruction"], one["told"]) for one in lines}
        assert instructions
        assert instructions <= {("go to the left", "go to the right"), ("go to the right", "go to the left")}
    finally:
        for name, path in gone.items():
            (tmp_path / name).rename(path)


def test_vla_export_has_weights_statistics_and_tokenizer(finished, tmp_path):
    export(ExportOptions(run=str(finished), out=str(tmp_path / "out"), trust=True))
    for name in ("statistics.json", "tokenizer.json"):
        assert (tmp_path / "out" / name).read_text() == (finished / name).read_text()
    state = weights(tmp_path / "out")
    model = restore(finished, "last", ema=True, trust=True).model
    assert state.keys() == model.state_dict().keys()
    own = model.state_dict()
    assert all(torch.equal(state[name], own[name]) for name in own)
    init_from(tmp_path / "out/model.safetensors", ALONE, model)


def test_sample_refuses_a_policy_run(finished):
    with pytest.raises(ConfigError, match="whose objective FlowPolicy generates no samples"):
        sample(SampleOptions(run=str(finished), trust=True))


@pytest.mark.long
def test_model_base_loads_all_weights_of_a_vla_policy(finished, folder, tmp_path):
    own = [word for word in SMALL if not word.startswith("model.")]
    words = [*own, "model=base", f"model.path={finished}", f"data.cache_dir={folder / 'cache'}"]
    words += ["hparams.lr=1e-30", "scheduler.min_lr=0", "hparams.max_steps=1"]
    config = compose(words, config_dir=folder / "conf")
    assert config.model.backbone.init_from is None
    run(config, tmp_path / "again")
    before, after = (
        restore(one, "last", ema=ema, trust=True) for one, ema in ((finished, True), (tmp_path / "again", False))
    )
    expected = before.model.state_dict()
    assert all(torch.equal(after.model.state_dict()[name], expected[name]) for name in expected)


@pytest.mark.parametrize("missing", ["tokenizer.json", "statistics.json"])
def test_restore_refuses_a_vla_run_with_a_missing_file(missing, finished, tmp_path):
    shutil.copytree(finished, tmp_path / "run", symlinks=True)
    (tmp_path / "run" / missing).unlink()
    with pytest.raises(ConfigError, match=f"has no {missing}, which a run "):
        restore(tmp_path / "run", "last", ema=True, trust=True)


@pytest.mark.long
def test_killed_vla_run_resumes_bit_for_bit(shell, folder, vlm):
    words = [*SMALL, f"model.backbone.init_from={vlm}", f"data.cache_dir={folder / 'cache'}", "hparams.max_steps=40"]
    words += [
        f"hydra.searchpath=[{folder / 'conf'}]",
        "checkpoint.interval='4 steps'",
        "evaluation.interval='20 steps'",
    ]
    words += ["checkpoint.resume=auto", "tracking.log_every_n_steps=1"]
    shell.run(*words, "hydra.run.dir=whole")
    process = shell.start(*words, "hydra.run.dir=run")
    shell.wait_for_steps(process, shell.cwd / "run", 8)
    process.send_signal(signal.SIGKILL)
    process.wait(60)
    shell.run(*words, "hydra.run.dir=run")
    found, expected = (
        restore(shell.cwd / name, "last", ema=False, trust=True).model.state_dict() for name in ("run", "whole")
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    rollouts = [(shell.cwd / name / "plots/rollouts.jsonl").read_text() for name in ("run", "whole")]
    assert rollouts[0] == rollouts[1]
