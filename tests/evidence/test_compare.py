"""`tests/evidence/compare.py` detects equal and unequal training runs."""

import json
import re
import subprocess

import pytest
from evidence import compare


def write_run(work, loss=2.5, speed=100.0, weights=b"abc"):
    run = work / "a" / "run"
    (run / "checkpoints" / "step_1").mkdir(parents=True)
    (run / "checkpoints" / "latest").symlink_to("step_1")
    (run / "checkpoints" / "step_1" / "shard-00000.safetensors").write_bytes(weights)
    record = {"step": 1, "loss": loss, "tokens_per_second": speed, "step_seconds": 1 / speed}
    (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    return work


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"speed": 50.0}, None),
        ({"loss": 2.5000000000000004}, "step 1: loss 2.5 != 2.5000000000000004"),
        ({"loss": float("nan")}, "step 1: loss 2.5 != nan"),
        ({"weights": b"abd"}, "the tensors of the last checkpoint differ"),
    ],
)
def test_compare_checks_losses_and_weights_but_not_times(tmp_path, change, difference):
    assert compare.compare("a", write_run(tmp_path / "before"), write_run(tmp_path / "after", **change)) == difference


@pytest.mark.long
def test_compare_finds_the_working_tree_equal_to_head(capsys, monkeypatch):
    try:
        subprocess.run(["git", "rev-parse", "HEAD"], cwd=compare.ROOT, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this is not a git clone")
    shorter = ["hparams.max_steps=6", "evaluation.interval=3 steps"]
    monkeypatch.setattr(compare, "COMMON", [*compare.COMMON, *shorter])
    text = ["data=text", f"data.path='{compare.ROOT}/docs/architecture.md'", "data.vocab_size=300"]
    monkeypatch.setitem(compare.RUNS, "fsdp", [*compare.RUNS["fsdp"], *text])
    assert compare.main("HEAD", "fsdp") == 0
    assert capsys.readouterr().out == "pretrain: equal\nfsdp: equal\n"


@pytest.mark.long
def test_compare_reports_a_changed_learning_rate(monkeypatch, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    assert compare.train(compare.ROOT, "pretrain", before) is None
    monkeypatch.setitem(compare.RUNS, "pretrain", [*compare.RUNS["pretrain"], "hparams.lr=1e-3"])
    assert compare.train(compare.ROOT, "pretrain", after) is None
    assert re.match(r"step 1: lr 0\.\d+ != 0\.001$", compare.compare("pretrain", before, after))
