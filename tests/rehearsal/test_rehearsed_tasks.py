"""Runs of each task on fake GPUs: no host waits in a step."""

import json

import pytest
from support.policy_parts import REACH_POLICY
from support.tiny import SMALL_LM, TINY_DIT

pytestmark = pytest.mark.long
QUIET = ["optimizer=adamw", "precision=amp_bf16", "evaluation.write_samples=false", "checkpoint=none"]
ARITHMETIC = ["data=arithmetic", "data.num_rows=64", "data.seq_len=256", "hparams.per_gpu_batch_size=2"]


def batch(ranks):
    return [f"hparams.global_batch_size={4 * ranks}", "hparams.per_gpu_batch_size=2"]


def assert_no_waits(record, expected=0):
    assert record.result["status"] == "finished"
    waits = record.waits_of(record.step)
    assert sum(wait.count for wait in waits) == expected, "\n".join(map(str, waits))


@pytest.fixture(scope="module")
def base(rehearsed, tmp_path_factory):
    """The run directory of an unsharded language model with zero weights; of a sharded one, rank 0 alone is saved."""
    folder = tmp_path_factory.mktemp("base") / "run"
    words = [*SMALL_LM, *ARITHMETIC, "data.form=text", *batch(1), "optimizer=adamw", "evaluation.write_samples=false"]
    record = rehearsed(*words, world_size=1, run_dir=folder)
    assert record.result["status"] == "finished"
    return folder


@pytest.mark.parametrize("ranks", [1, 8])
def test_transformers_llama_has_no_host_waits(rehearsed, ranks):
    record = rehearsed("debug=fast", "model=hf_llama", "data.seq_len=64", *QUIET, *batch(ranks), world_size=ranks)
    assert_no_waits(record)
    assert {call.kernel for call in record.attention} == {"flash"}


@pytest.mark.parametrize("ranks", [1, 8])
def test_diffusion_has_no_host_waits(rehearsed, ranks):
    record = rehearsed(*TINY_DIT, *QUIET, *batch(ranks), world_size=ranks)
    assert_no_waits(record)


@pytest.mark.parametrize("packing", [False, True])
def test_sft_has_no_host_waits(rehearsed, packing):
    words = [*SMALL_LM, *ARITHMETIC, "objective=sft", f"data.packing={packing}"]
    record = rehearsed(*words, *QUIET, *batch(8), "distributed=fsdp", world_size=8)
    assert_no_waits(record)


def test_dpo_has_no_host_waits(rehearsed, base):
    words = ["model=base", f"model.path={base}", *ARITHMETIC, "data.form=preferences", "objective=dpo"]
    record = rehearsed("debug=fast", *words, *QUIET, *batch(8), "distributed=fsdp", world_size=8)
    assert_no_waits(record)


def test_lora_has_no_host_waits(rehearsed, base):
    words = ["model=base", f"model.path={base}", *ARITHMETIC, "objective=sft", "peft=lora"]
    record = rehearsed("debug=fast", *words, *QUIET, *batch(8), "distributed=fsdp", world_size=8)
    assert_no_waits(record)


def test_grpo_updates_have_no_host_waits(rehearsed, base):
    words = ["model=base", f"model.path={base}", *ARITHMETIC, "data.form=prompts", "environment=arithmetic"]
    own = ["objective=grpo", "objective.max_new_tokens=8", "objective.num_prompts_per_step=8"]
    own += ["objective.num_generations_per_prompt=4", "objective.generation_batch_size=32", "evaluation=reward"]
    words = ["debug=fast", *words, *own, *QUIET, "hparams.per_gpu_batch_size=2", "hparams.global_batch_size=32"]
    record = rehearsed(*words, "distributed=fsdp", world_size=8)
    assert_no_waits(record)


@pytest.mark.parametrize("ranks", [1, 8])
def test_robot_policy_has_no_host_waits(rehearsed, ranks):
    words = [word for word in REACH_POLICY if not word.startswith(("hparams.global", "hparams.per"))]
    record = rehearsed(*words, *QUIET, *batch(ranks), world_size=ranks)
    assert_no_waits(record)


@pytest.mark.parametrize(("ranks", "strategy"), [(1, []), (8, ["distributed=fsdp"]), (8, ["distributed=hsdp"])])
def test_rehearsed_resume_continues_at_the_saved_step(rehearsed, tmp_path, ranks, strategy):
    words = [*SMALL_LM, "optimizer=adamw", "evaluation.write_samples=false", "tracking.log_every_n_steps=1"]
    words += ["hparams.per_gpu_batch_size=1", f"hparams.global_batch_size={2 * ranks}"]
    first = rehearsed(*words, world_size=1, run_dir=tmp_path / "run")
    assert (first.last_step, first.steps) == (2, 2)
    second = rehearsed(*words, *strategy, world_size=ranks, steps=4, run_dir=tmp_path / "run")
    assert (second.last_step, second.steps) == (4, 2)
    assert_no_waits(second)
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert set(steps) == {1, 2, 3, 4}
