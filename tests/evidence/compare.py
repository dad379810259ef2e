"""Usage: `python tests/evidence/compare.py REF [NAME ...]`. Compare training at a commit with training in this tree.

Check out REF in a temporary git worktree and run the trainings NAME of `RUNS`, by default all, in both trees. The
recorded metrics, except times and memory, and the tensors of the last checkpoint must be bitwise equal. Print a line
for each run; exit with code 1 if any run differs or fails.
"""

import json
import os
import subprocess
import sys
import tempfile
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("_second", "_seconds", "_bytes", "tflops", "mfu")
COMMON = ["hparams.max_steps=20", "tracking=none", "tracking.log_every_n_steps=1", "evaluation.interval=10 steps"]
COMMON += ["evaluation.write_samples=false", "evaluation.max_samples=16"]
SMALL = ["model.hidden_size=32", "model.intermediate_size=64", "model.num_layers=2", "model.num_heads=2"]
TEXT = ["hparams=llm", *SMALL, "model.num_kv_heads=2", "data.seq_len=64", "model.max_seq_len=64"]
TUNE = ["model.path=pretrain/run", "data.num_rows=64"]
ROLLOUT = ["objective.num_prompts_per_step=2", "objective.num_generations_per_prompt=4", "objective.max_new_tokens=8"]
BATCH = ["hparams.global_batch_size=8", "hparams.per_gpu_batch_size=4"]
RAMP = ["hparams.batch_ramp.start=4", "hparams.batch_ramp.increment=4", "hparams.batch_ramp.over_samples=40"]
HELD_OUT = ["evaluation.evaluators.success=null", "evaluation.metric=val_loss", "evaluation.direction=minimize"]
RUNS = {
    "pretrain": ["experiment=pretrain_arithmetic", *SMALL, "model.num_kv_heads=2", "data.num_rows=256"],
    "muon_amp": [*TEXT, "precision=amp_bf16", "hparams.ema_decay=0.9"],
    "sgd_wsd": [*TEXT, "optimizer=sgd", "scheduler=wsd", "precision=fp32", "hparams.grad_checkpointing=true"],
    "pure_bf16": [*TEXT, "optimizer=adamw", "precision=pure_bf16"],
    "ramp": [*TEXT, *RAMP],
    "ddp": [*TEXT, "distributed=ddp", "distributed.nproc_per_node=2"],
    "ddp_sharded": [*TEXT, "distributed=ddp", "distributed.shard_optimizer=true", "distributed.nproc_per_node=2"],
    "fsdp": [*TEXT, "optimizer=adamw", "distributed=fsdp", "distributed.nproc_per_node=2"],
    "tensor_parallel": [*TEXT, "distributed=fsdp", "distributed.tensor_parallel=2", "distributed.nproc_per_node=2"],
    "diffusion": ["hparams=diffusion", "model.hidden_size=32", "model.num_layers=2", "model.num_heads=2"],
    "policy": ["hparams=policy", "data.episodes=8", *HELD_OUT],
    "vlm": ["experiment=vlm_scenes", "data.num_scenes=128"],
    "sft": ["experiment=sft_arithmetic", *TUNE],
    "lora": ["experiment=sft_lora", *TUNE],
    "dpo": ["experiment=dpo_arithmetic", *TUNE],
    "grpo": ["experiment=grpo_arithmetic", *TUNE, *ROLLOUT, *BATCH],
    "distill": ["experiment=distill_arithmetic", *TUNE, "objective.teacher=pretrain/run"],
}
"""Overrides of each run, by name; runs after `pretrain` may start from its weights."""


def train(tree: Path, name: str, work: Path) -> str | None:
    """Train the run `name` with the code in `tree`; return the last line of stderr if it fails, otherwise None."""
    (work / name).mkdir(parents=True)
    words = [sys.executable, "-m", "foundry", f"hydra.run.dir={name}/run", *COMMON, *RUNS[name]]
    environment = {**os.environ, "PYTHONPATH": str(tree), "FOUNDRY_CACHE": str(work / "cache")}
    done = subprocess.run(words, cwd=work, env=environment, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def read_metrics(run: Path) -> list[dict[str, object]]:
    """Return the recorded metrics of a run, except times, speeds and bytes."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if not key.endswith(MEASURED)} for record in records]


def read_digests(run: Path) -> dict[str, str]:
    """Return the SHA-256 of each shard of the last checkpoint, by file name."""
    shards = sorted((run / "checkpoints" / "latest").resolve().glob("*.safetensors"))
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in shards}


def compare(name: str, before: Path, after: Path) -> str | None:
    """Return the first difference between the runs `name` in two folders as text, or None if they are equal."""
    old, new = (read_metrics(work / name / "run") for work in (before, after))
    if len(old) != len(new):
        return f"{len(old)} records of metrics, then {len(new)}"
    for one, other in zip(old, new, strict=True):
        if keys := [key for key in one.keys() | other.keys() if repr(one.get(key)) != repr(other.get(key))]:
            values = ", ".join(f"{key} {one.get(key)} != {other.get(key)}" for key in sorted(keys))
            return f"step {one['step']}: {values}"
    old_weights, new_weights = (read_digests(work / name / "run") for work in (before, after))
    if not old_weights or old_weights != new_weights:
        return "the tensors of the last checkpoint differ"
    return None


def main(ref: str, *names: str) -> int:
    """Train `pretrain` and the runs `names` (all if empty) in both trees, and print the first difference of each."""
    chosen = {"pretrain": None, **dict.fromkeys(names or RUNS)}
    with tempfile.TemporaryDirectory(prefix="foundry-compare-") as folder:
        tree, before, after = Path(folder, "tree"), Path(folder, "before"), Path(folder, "after")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, ref], cwd=ROOT, check=True)
        try:
            differences = dict.fromkeys(chosen)
            for name in chosen:
                failures = [train(root, name, work) for root, work in ((tree, before), (ROOT, after))]
                failure = next(filter(None, failures), None)
                differences[name] = failure or compare(name, before, after)
                sys.stdout.write(f"{name}: {differences[name] or 'equal'}\n")
                sys.stdout.flush()
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    return int(any(differences.values()))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
