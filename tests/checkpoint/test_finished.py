"""A finished run directory returns its result unless a setting that affects the result has changed."""

import functools
import json

import pytest
from support.composition import configure

from foundry.checkpoint.finished import check_finished
from foundry.checkpoint.folder import Manifest
from foundry.checkpoint.resume_point import ResumePoint
from foundry.config.record.frozen import hash_config, plain, save_config
from foundry.core.errors import ConfigError
from foundry.run_dir.result import find_result
from foundry.run_dir.strict_json import encode

BASE = ["hparams.max_steps=40"]
OTHER_RESULTS = [
    ["hparams.lr=2e-3"],
    ["hparams.lr=1e-9"],
    ["hparams.max_steps=20"],
    ["hparams.seed=7"],
    ["hparams.seed=7", "checkpoint.on_changed_config=warn"],
    ["hparams.ema_decay=0.9"],
    ["hparams.grad_clip_norm=0.5"],
    ["hparams.global_batch_size=64"],
    ["scheduler=constant"],
    ["scheduler.horizon='80'"],
    ["optimizer=adamw"],
    ["optimizer.weight_decay=0.3"],
    ["model.hidden_size=64"],
    ["precision=fp32"],
    ["data.held_out=0.2"],
    ["evaluation.max_samples=4"],
    ["evaluation.interval=null"],
    ["evaluation.early_stopping.patience=3"],
    ["guard.spike_zscore=20"],
    ["checkpoint.keep_best.mode=max"],
    ["checkpoint.resume=elsewhere"],
]
SAME_RESULT = [
    ["tracking.log_every_n_steps=3"],
    ["tracking=none"],
    ["checkpoint.keep_last=1", "checkpoint.asynchronous=false"],
    ["hparams.per_gpu_batch_size=4"],
    ["hparams.grad_checkpointing=true"],
    ["data.num_workers=1"],
    ["data.cache_dir=elsewhere"],
    ["distributed=fsdp"],
    ["evaluation.write_samples=false"],
]


configured = functools.cache(configure)


def recorded(config):
    return json.loads(encode(plain(config)))


def ask(run_dir, overrides, *, kept="config.yaml"):
    """Request the result of a run that finished with `BASE`, with settings changed by `overrides`."""
    was, now = (
        configured(*BASE),
        configured(*BASE, *[word for word in overrides if not word.startswith("hparams.max_steps")]),
    )
    if any(word.startswith("hparams.max_steps") for word in overrides):
        now = configured(*overrides)
    result = {"config_hash": hash_config(was), "metric": 1.5}
    resume_point = None
    if kept == "config.yaml":
        save_config(was, run_dir)
    if kept == "manifest":
        save_config(now, run_dir)  # Launchers write the new settings before a job.
        resume_point = ResumePoint(run_dir, Manifest(step=40, config=recorded(was), config_hash=hash_config(was)))
    check_finished(now, recorded(now), hash_config(now), run_dir, resume_point, result, dict)


@pytest.mark.parametrize("kept", ["config.yaml", "manifest"])
@pytest.mark.parametrize("overrides", OTHER_RESULTS, ids=" ".join)
def test_finished_run_refuses_settings_that_change_the_result(tmp_path, overrides, kept):
    with pytest.raises(ConfigError) as refused:
        ask(tmp_path, overrides, kept=kept)
    keys = [violation.key for violation in refused.value.violations]
    assert any(key.startswith(overrides[0].partition("=")[0]) for key in keys)
    assert all("holds a finished run with" in violation.message for violation in refused.value.violations)


@pytest.mark.parametrize("overrides", [[], *SAME_RESULT], ids=" ".join)
def test_finished_run_returns_its_result_for_equivalent_settings(tmp_path, overrides, caplog):
    ask(tmp_path, overrides)
    assert "holds a finished run" in caplog.text


@pytest.mark.parametrize("content", [None, "", "- 1", "a: [", "a: ${", "a: ${oc.env:HOME}"])
def test_finished_run_without_its_config_is_a_config_error(tmp_path, content):
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    with pytest.raises(ConfigError) as refused:
        ask(tmp_path, ["hparams.lr=2e-3"], kept="nothing")
    assert "finished run" in str(refused.value)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "3", b"\xff", "[" * 100_000])
def test_missing_or_damaged_result_file_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "result.json").write_bytes(content if isinstance(content, bytes) else content.encode())
    assert find_result(tmp_path) is None
