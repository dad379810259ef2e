"""Other files of a run directory that could name code: trial.json, hydra.yaml, overrides.yaml and weights."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
import yaml
from attacks import targets
from support.composition import configure
from support.tiny import TINY_DIT, TINY_LM

from foundry.config.checks.optuna_parts import build_part, check_part
from foundry.config.composition.job_overrides import recorded_overrides
from foundry.config.schemas.sweeper import Search
from foundry.core.errors import ConfigError
from foundry.engine.train import train
from foundry.evaluators.pruning import Pruning
from foundry.parallel.process_group import World
from foundry.run_dir.study_storage import open_storage

ALONE = World.single(torch.device("cpu"))
QUIET = ["tracking=none", "evaluation.write_samples=false", "tracking.progress=false"]
optuna = pytest.importorskip("optuna")


def hostile(canary):
    """Yield hostile pruner and sampler nodes."""
    touch = {"_target_": "os.system", "command": f"touch {canary}"}
    yield from (attack for attack in targets(canary).values() if isinstance(attack, dict))
    yield {"_target_": "optuna.pruners.PatientPruner", "wrapped_pruner": touch, "patience": 1}
    yield {"_target_": "optuna.pruners.PatientPruner", "wrapped_pruner": {"a": [touch]}, "patience": 1}
    yield {"_target_": "optuna.pruners.MedianPruner", "_args_": [touch]}
    yield {"_target_": "optuna.pruners.MedianPruner", "_partial_": True}
    yield {"_target_": "optuna.pruners._base.warnings.warn", "message": "x"}
    yield {"_target_": "optuna.pruners.os.system", "command": f"touch {canary}"}
    yield {"_target_": "optuna.pruners.TYPE_CHECKING"}
    yield {"_target_": "optuna.samplers._cmaes.pickle.loads", "data": "x"}
    yield {"_target_": "optuna.storages.journal.JournalFileBackend", "file_path": str(canary)}
    yield {"_target_": ["os.system"], "command": f"touch {canary}"}
    yield {"_target_": None}


@pytest.mark.parametrize("kind", ["sampler", "pruner"])
def test_sampler_and_pruner_targets_must_be_optuna_classes(kind, tmp_path):
    canary, tried = tmp_path / "canary", 0
    for attack in hostile(canary):
        with pytest.raises(ValueError, match=r"optuna|_args_|_partial_|_target_"):
            build_part(kind, attack)
        message = [violation.key for violation in Search(**{kind: attack}).check()]
        is_named = any(key.startswith(f"hydra.sweeper.{kind}") for key in message)
        assert is_named or attack["_target_"] == "optuna.pruners.TYPE_CHECKING", attack
        tried += 1
    assert tried >= 25
    assert not canary.exists()


@pytest.mark.filterwarnings("ignore:PatientPruner is experimental")  # the only Optuna pruner that wraps another one
def test_nested_optuna_pruner_is_built():
    node = {
        "_target_": "optuna.pruners.PatientPruner",
        "wrapped_pruner": {"_target_": "optuna.pruners.MedianPruner", "n_startup_trials": 2},
        "patience": 1,
    }
    assert not list(check_part("pruner", node, "x"))
    assert isinstance(build_part("pruner", node), optuna.pruners.PatientPruner)
    grid = {"_target_": "optuna.samplers.GridSampler", "search_space": {"a": [1, 2]}}
    assert isinstance(build_part("sampler", grid), optuna.samplers.GridSampler)
    with pytest.raises(ValueError, match="did you mean MedianPruner"):
        build_part("pruner", {"_target_": "optuna.pruners.MedianPrunr"})


def link_of(**changes):
    pruner = {"_target_": "optuna.pruners.MedianPruner"}
    link = {"journal": "../optuna.jsonl", "study": "search", "number": 0, "metric": "val_loss", "pruner": pruner}
    return {**link, **changes}


@pytest.fixture
def sweep(tmp_path):
    """The directory of a search with an empty run directory."""
    folder = tmp_path / "sweep"
    (folder / "0").mkdir(parents=True)
    optuna.create_study(study_name="search", storage=open_storage(folder / "optuna.jsonl"))
    return folder


def test_pruning_reads_the_trial_link(sweep):
    (sweep / "0" / "trial.json").write_text(json.dumps(link_of()))
    assert Pruning.of(sweep / "0", ALONE) is not None
    (sweep / "0" / "trial.json").unlink()
    assert Pruning.of(sweep / "0", ALONE) is None


def test_malformed_or_hostile_trial_links_are_rejected(sweep, tmp_path):
    canary, elsewhere = tmp_path / "canary", tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "optuna.jsonl").write_text("private\n")
    (sweep / "link").symlink_to(elsewhere)
    wrong = [link_of(pruner=attack) for attack in hostile(canary)]
    journals = [
        "../../elsewhere/optuna.jsonl",
        str(elsewhere / "optuna.jsonl"),
        "../link/optuna.jsonl",
        "../other",
        "x",
    ]
    wrong += [link_of(journal=journal) for journal in [*journals, "../../canary", "", 3, None]]
    wrong += [link_of(study="nope"), link_of(number="0"), link_of(pruner=[]), {}, [], None, 3, "text"]
    texts = [*map(json.dumps, wrong), "", "{", "[" * 100_000, "\0"]
    for text in texts:
        (sweep / "0" / "trial.json").write_text(text)
        with pytest.raises(ConfigError) as refused:
            Pruning.of(sweep / "0", ALONE)
        assert str(refused.value).count("\n") == 0
        assert "trial.json" in str(refused.value)
    assert len(texts) >= 40
    assert not canary.exists()
    assert (elsewhere / "optuna.jsonl").read_text() == "private\n"


def test_resume_rejects_a_hostile_pruner_in_the_run_directory(dit, tmp_path):
    canary = tmp_path / "canary"
    pruner = {"_target_": "torch.utils.collect_env.run", "command": f"touch {canary}"}
    (dit / "trial.json").write_text(json.dumps(link_of(pruner=pruner)))
    longer = [*TINY_DIT, "hparams.max_steps=9", "tracking=none", "evaluation.write_samples=false"]
    with pytest.raises(ConfigError, match=r"torch\.utils\.collect_env\.run"):
        train(configure(*longer, "tracking.progress=false", "checkpoint.scheduler_on_resume=config"), dit)
    assert not canary.exists()


def test_init_from_reads_weights_without_building_parts_of_the_run(lm, tmp_path):
    canary = tmp_path / "canary"
    settings = yaml.safe_load((lm / "config.yaml").read_text())
    settings["model"] = {"_target_": "torch.utils.collect_env.run", "command": f"touch {canary}"}
    (lm / "config.yaml").write_text(yaml.safe_dump(settings))
    overrides = [*TINY_LM, *QUIET, "hparams.max_steps=1"]
    for number, start in enumerate((lm, lm / "checkpoints" / "latest")):
        train(configure(*overrides, f"model.init_from={start}"), tmp_path / str(number))
    longer = [f"checkpoint.resume={lm}", "hparams.max_steps=9", "checkpoint.scheduler_on_resume=config"]
    train(configure(*overrides, *longer, "checkpoint.on_changed_config=warn"), tmp_path / "resumed")
    assert not canary.exists()


@pytest.mark.parametrize("content", [b"", b"text", b"\0" * 100, b'{"a": 1}', b"\xff" * 9])
def test_invalid_weights_in_init_from_give_a_one_line_error(lm, tmp_path, content):
    (tmp_path / "weights.safetensors").write_bytes(content)
    shutil.copytree(lm / "checkpoints", tmp_path / "damaged" / "checkpoints", symlinks=True)
    shard = next((tmp_path / "damaged" / "checkpoints" / "latest").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    for path in (tmp_path / "weights.safetensors", tmp_path, tmp_path / "damaged"):
        with pytest.raises(ConfigError, match=r"^model\.init_from: ") as refused:
            train(configure(*TINY_LM, *QUIET, f"model.init_from={path}"), tmp_path / "run")
        assert str(refused.value).count("\n") == 0


def test_sweep_worker_requires_a_launcher_or_trust(tmp_path):
    canary = tmp_path / "canary"
    (tmp_path / "run" / ".hydra").mkdir(parents=True)
    logging = {"version": 1, "handlers": {"x": {"()": "os.system", "command": f"touch {canary}"}}}
    hydra = {"hydra": {"job": {"env_set": {}}, "job_logging": logging}}
    (tmp_path / "run" / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(hydra))
    command = [sys.executable, "-m", "foundry.sweeps.worker", str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "trust=true" in done.stderr
    assert not canary.exists()


def test_recorded_overrides_do_not_expand_yaml_aliases_or_tags(tmp_path):
    (tmp_path / ".hydra").mkdir()
    for text in ("a: &a [*a]", "l: &l [x]\nm: [*l, *l]", "[" * 100_000, "!!python/object/apply:os.system [id]", "\0"):
        (tmp_path / ".hydra" / "overrides.yaml").write_text(text)
        assert recorded_overrides(tmp_path) == ()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- hparams.lr=1e-3\n- model=dit\n")
    assert recorded_overrides(tmp_path) == ("hparams.lr=1e-3", "model=dit")
