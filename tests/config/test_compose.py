"""Composition of all options and experiments, its errors, and the help page."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.examples import long_case
from support.option_words import FREE, OPTIONS, free_words, has_no_value, words_for

from foundry.config.composition.compose import config_dir
from foundry.config.composition.store import group_schemas
from foundry.config.record.frozen import load_config, plain, save_config
from foundry.config.schemas.distributed import Distributed
from foundry.config.schemas.root import to_config
from foundry.core.errors import ConfigError

OF_A_RUN = [
    *(
        "torch",
        "numpy",
        "pyarrow",
        "tokenizers",
        "transformers",
        "diffusers",
        "sklearn",
        "rich",
        "matplotlib",
        "mlflow",
    ),
    *("optuna", "submitit"),
]
TASKS = {"llm": ("transformer", "stdlib"), "diffusion": ("dit", "digits")}


@pytest.mark.parametrize("place", range(max(len(OPTIONS[group]) for group in FREE)))
def test_every_option_of_free_groups_composes(compose, place):
    """One composition takes 0.2 seconds, so each case covers one option of every free group."""
    config = to_config(compose(*free_words(place)))
    assert all(plain(config)[group] is not None for group in FREE)


# In the default selection, tests/evidence/test_compositions.py composes each option and each experiment.
@pytest.mark.long
@pytest.mark.parametrize(
    ("group", "option"),
    [(group, option) for group, options in OPTIONS.items() if group not in FREE for option in options],
)
def test_every_option_composes(compose, group, option):
    if has_no_value(group, option):
        with pytest.raises(ConfigError, match="has no value"):
            compose(*words_for(group, option))
        return
    config = to_config(compose(*words_for(group, option)))
    assert plain(config)[group] is not None


@pytest.mark.long
@pytest.mark.parametrize("name", [p.stem for p in (Path(config_dir()) / "experiment").glob("*.yaml")])
def test_every_experiment_composes_and_differs_from_the_default(compose, name):
    overrides = [f"experiment={name}"]
    if "model.path=" in (Path(config_dir()) / "experiment" / f"{name}.yaml").read_text():  # needs a run of the user
        with pytest.raises(ConfigError, match=r"^model\.path: has no value"):
            compose(*overrides)
    else:
        assert plain(to_config(compose(*overrides))) != plain(to_config(compose()))


def test_diffusion_hparams_set_the_task_and_allow_other_overrides(compose):
    config = to_config(compose("hparams=diffusion", "scheduler=wsd", "objective.prediction=epsilon"))
    assert type(config.model).__name__ == "DiT"
    assert type(config.scheduler).__name__ == "WSD"
    assert (config.hparams.lr, config.hparams.grad_clip_norm, config.hparams.loss_function) == (4e-3, 1.0, "mse")
    assert (config.hparams.global_batch_size, config.hparams.per_gpu_batch_size) == (128, 16)
    assert config.scheduler.min_lr == 1e-5


SEED = "hparams.seed=7"
Z_LOSS = "hparams.z_loss_coefficient=0.25"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["objective=next_token", Z_LOSS], {"z_loss_coefficient": 0.25}),
        (["objective=sft", "data=arithmetic", SEED, Z_LOSS], {"seed": 7, "z_loss_coefficient": 0.25}),
        (["hparams=diffusion", SEED], {"seed": 7}),
        (["hparams=policy", "objective=diffusion_policy", SEED], {"seed": 7}),
        (["hparams=policy", "objective=flow_policy", SEED], {"seed": 7}),
    ],
)
def test_objectives_inherit_seed_and_z_loss_from_hparams(compose, words, expected):
    objective = to_config(compose(*words)).objective
    assert {name: getattr(objective, name) for name in expected} == expected


def test_precision_aliases_resolve_to_their_modes(compose):
    for alias, name in {"amp": "amp_bfloat16", "amp_bf16": "amp_bfloat16", "float32": "fp32"}.items():
        assert compose(f"precision={alias}").precision.mode.name == name


def test_accum_freq_is_computed_from_batch_sizes_and_ranks(compose):
    overrides = ["hparams.global_batch_size=64", "hparams.per_gpu_batch_size=8", "distributed.nproc_per_node=2"]
    assert compose(*overrides).hparams.accum_freq == 4
    with pytest.raises(ConfigError, match=r"hparams\.accum_freq: is computed"):
        compose("hparams.accum_freq=7")


def test_accum_freq_counts_data_parallel_ranks_only(compose, monkeypatch):
    monkeypatch.setattr(Distributed, "dp_size", lambda self, world_size: world_size // 2)
    sizes = ("hparams.global_batch_size=32", "hparams.per_gpu_batch_size=4")
    assert compose("distributed=fsdp", "distributed.nproc_per_node=4", *sizes).hparams.accum_freq == 4


def test_schema_defaults_match_the_source_documents():
    hparams = OmegaConf.structured(group_schemas("hparams")["HParams"])
    assert (hparams.global_batch_size, hparams.per_gpu_batch_size, hparams.seed, hparams.lr) == (512, 8, 42, 1e-4)
    adamw = group_schemas("optimizer")["AdamW"]()
    assert (adamw.beta1, adamw.beta2, adamw.eps, adamw.weight_decay) == (0.9, 0.95, 1e-8, 0.01)
    wsd = group_schemas("scheduler")["WSD"]()
    assert (wsd.warmup, wsd.decay, wsd.min_lr) == ("1000", "0.3", 0.0)


def test_all_config_errors_are_reported_together(compose):
    with pytest.raises(ConfigError) as refused:
        compose("hparams.leer=1", "scheduler=wds", "hparams.per_gpu_batch_size=7", "precision.mode=fp8")
    keys = {violation.key for violation in refused.value.violations}
    assert keys == {"hparams.leer", "scheduler", "hparams.global_batch_size", "precision.mode"}
    assert "did you mean hparams.lr?" in str(refused.value)
    assert "did you mean wsd?" in str(refused.value)


def test_custom_model_composes_without_a_schema(compose, tmp_path, monkeypatch):
    (tmp_path / "mypkg.py").write_text("class MyModel:\n    def __init__(self, *, width, nested):\n        pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.yaml").write_text("_target_: mypkg.MyModel\nwidth: 3\nnested: {a: [1, 2]}\n")
    overrides = [f"hydra.searchpath=[{tmp_path}]", "model=mine", "model.width=9"]
    assert to_config(compose(*overrides)).model == {"_target_": "mypkg.MyModel", "width": 9, "nested": {"a": [1, 2]}}
    with pytest.raises(ConfigError, match=r"model\.widht: is not a key of model; did you mean model\.width"):
        compose(*overrides, "model.widht=9")


def test_unknown_key_in_an_option_file_is_reported_with_the_file(compose, tmp_path):
    (tmp_path / "optimizer").mkdir()
    (tmp_path / "optimizer" / "mine.yaml").write_text("defaults: [adamw, _self_]\nweight_decya: 0.1\n")
    with pytest.raises(ConfigError, match=r"mine.*weight_decya") as refused:
        compose(f"hydra.searchpath=[{tmp_path}]", "optimizer=mine")
    assert len(refused.value.violations) == 1


def test_saved_config_loads_as_an_equal_typed_config(compose, tmp_path):
    for overrides in (["hparams=diffusion", "scheduler=wsd"], ["distributed=hsdp", "distributed.num_replicas=1"], []):
        config = to_config(compose(*overrides))
        save_config(config, tmp_path)
        assert load_config(tmp_path) == config


WRONG = ["hparams.per_gpu_batch_size=7"]


@pytest.mark.parametrize(
    "overrides",
    [
        WRONG,
        [*WRONG, "--cfg", "job"],
        ["-m", "hparams.per_gpu_batch_size=16,7,5"],
        long_case(["-m", "hparams.per_gpu_batch_size=16,7", "scheduler=wsd,cosine"]),
        long_case(["-m", "scheduler=wsd,wds"]),
        long_case(["-m", "hparams.seed=1,2", "hparams.leer=3"]),
    ],
    ids=["run", "cfg", "sweep", "sweep-two", "sweep-option", "sweep-fixed"],
)
def test_config_error_exits_with_2_in_runs_cfg_and_sweeps(overrides, run_command):
    stderr = run_command(*overrides, code=2)[1]
    assert "Traceback" not in stderr
    assert "HYDRA_FULL_ERROR" not in stderr
    assert list(run_command.cwd.iterdir()) == [], "nothing may be created"


def test_help_lists_built_in_and_user_options_of_every_group(run_command):
    own = run_command.cwd / "own" / "scheduler" / "mine.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("_target_: mine.Schedule\n")
    stdout = run_command("--config-dir", "own", "--help")[0]
    listed = dict(re.findall(r"^  (\w+)= +(\S.*(?:\n {20}.*)*)$", stdout, re.MULTILINE))
    for folder in (
        path for path in Path(config_dir()).iterdir() if path.is_dir() and path.name not in ("hydra", "local")
    ):
        options = {path.stem for path in folder.glob("*.yaml")}
        assert options | ({"mine"} if folder.name == "scheduler" else set()) == set(
            re.findall(r"\w+", listed[folder.name].partition(":")[0])
        )
    assert "the learning rate as a function of the" in " ".join(listed["scheduler"].split())
    assert len(re.findall(r"^ +foundry\b", stdout, re.MULTILINE)) >= 17
    assert "\n  Your options, in own: scheduler=mine\n" in stdout
    by_search_path = run_command("hydra.searchpath=[file://own]", "--help")[0]
    assert by_search_path == stdout


def test_sweep_help_lists_sweeper_and_launcher_settings(run_command):
    stdout = run_command("-m", "--help")[0]
    named = {line.split()[0] for line in stdout.splitlines() if line.startswith("  ")}
    assert {"hydra.sweeper.zip", "hydra.sweeper.n_trials", "hydra.launcher.n_jobs", "hydra.launcher.nodes"} <= named
    assert "hparams_search=lr_range,optuna_tpe" in stdout


def test_help_without_overrides_equals_the_composed_help_page(run_command):
    assert run_command("--help") == run_command("--help", "hydra.job.name=foundry")


def test_help_and_composition_import_no_training_libraries():
    code = (
        "import sys, foundry.commands.main, foundry.config.composition.compose as c; "
        "from foundry.sweeps.plugins import register; "
        "c.install(is_only_application=True); register(); "
        f"sys.exit(' '.join({set(OF_A_RUN)} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
