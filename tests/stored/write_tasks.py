"""`python tests/stored/write_tasks.py`: write the run directories of `tests/stored/tasks-0.1` that are missing.

`python -m foundry` with the overrides of `RUNS` trains each on a CPU; plots, logs and Hydra's files are left out. Paths
are relative to a folder with the files of `support/small_files.py`. `continued.json` has the metrics of one more
step and of the evaluation after it. A run directory that exists is kept: it belongs to the version that wrote it.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from evidence.compare import read_metrics
from support.checkpoint_parts import rewrite_manifest
from support.small_files import write_small_files

TASKS = Path(__file__).with_name("tasks-0.1")
CONTINUED = "continued.json"
STEPS = 2
READ_BY_PEOPLE = (".hydra", "plots", "foundry.log", ".lock")
WORDS = ["model.intermediate_size=32", "model.num_layers=1", "model.num_heads=2", "model.num_kv_heads=2"]
WIDTH = "model.hidden_size=8"
ON_BASE = ["model=transformer", "model.hidden_size=16", *WORDS, "data.tokenizer=base/tokenizer.json"]
ON_BASE += ["data.vocab_size=257", "data.seq_len=48"]
SGD = ["optimizer=sgd", "optimizer.momentum=0", "hparams.lr=0.1"]
COMMON = ["precision=fp32", "hparams.global_batch_size=4", "hparams.per_gpu_batch_size=4", "scheduler.horizon=4"]
COMMON += ["scheduler.warmup=1", "tracking=none", "tracking.log_every_n_steps=1", "evaluation.interval=null"]
COMMON += ["evaluation.max_samples=4", "checkpoint.keep_last=1", "checkpoint.keep_best.metric=null"]
BLOCKS = [WIDTH, "model.num_layers=1", "model.num_heads=2"]
EPISODES = ["simulator=none", "evaluation=default", "data=lerobot", "data.path=lerobot", "data.held_out=0.25"]
EPISODES += ["data.num_observations=1", "data.horizon=4", "objective.action_steps=2", "model.patch_size=2"]
GROUPS = ["objective.num_prompts_per_step=2", "objective.num_generations_per_prompt=2", "objective.max_new_tokens=8"]
RIGHT_BY_CHANCE = ["environment=format", "environment.pattern='(?s)[ -Z].*'"]
"""Some random answers start with one of these characters, so that rewards differ within a group."""
LOOKED = ["data=image_chats", "data.path=looked.jsonl", "data.image_size=16", "data.vocab_size=260"]
RUNS = {
    "diffusion": ["hparams=diffusion", *BLOCKS, "objective.sampling_steps=2", "objective.samples_per_class=1"],
    "policy": ["hparams=policy", *EPISODES, *BLOCKS],
    "lora": ["hparams=sft", "peft=lora", *ON_BASE, "model.init_from=base", "data.path=chats.jsonl"],
    "dpo": ["hparams=dpo", *ON_BASE, "model.init_from=base", *SGD, "data.path=preferences.jsonl"],
    "grpo": ["hparams=grpo", *RIGHT_BY_CHANCE, *ON_BASE, "model.init_from=base", *SGD, "data.path=prompts.jsonl"],
    "distillation": ["hparams=distillation", "objective.teacher=base", *ON_BASE, *SGD, "data=chats"],
    "vlm": ["hparams=vlm", *LOOKED, WIDTH, *WORDS, "data.seq_len=32", *SGD, "objective.sample_tokens=4"],
}
"""Overrides of each run by name, without `COMMON`."""
RUNS["diffusion"] += ["hparams.lr=5e-4"]  # the rate of hparams=diffusion when the run was written
RUNS["lora"] += ["hparams.lr=0.01", "objective.sample_tokens=8"]
RUNS["grpo"] += [*GROUPS, "objective.ref_policy_kl_penalty=0.1"]
RUNS["distillation"] += ["data.path=chats.jsonl"]


def overrides(name: str, steps: int) -> list[str]:
    """Return the overrides that train the run `name` for `steps` steps in a folder with its name."""
    return [*RUNS[name], *COMMON, f"hparams.max_steps={steps}", f"hydra.run.dir={name}"]


def outcome(run: Path) -> dict[str, Any]:
    """Return the metrics of the last step and of the evaluation after it, without speed and memory."""
    step, evaluation = read_metrics(run)[-2:]
    return {**step, **evaluation}


def write(name: str, folder: Path) -> dict[str, Any]:
    """Train a run in a folder with the small files and store it; return the outcome of one more step."""
    train(name, STEPS, folder)
    ignored = shutil.ignore_patterns(*READ_BY_PEOPLE)
    shutil.copytree(folder / name, TASKS / name, symlinks=True, ignore=ignored)
    checkpoint = TASKS / name / "checkpoints" / "latest"
    if base := json.loads((checkpoint / "manifest.json").read_text())["base"]:
        rewrite_manifest(checkpoint, base={**base, "path": "base"})  # not absolute; only messages use this path
    train(name, STEPS + 1, folder)
    return outcome(folder / name)


def train(name: str, steps: int, folder: Path) -> None:
    """Train the run `name` for `steps` steps with `python -m foundry` in a folder."""
    root, environment = Path(__file__).parents[2], dict(os.environ)
    environment.pop("FOUNDRY_CACHE", None)
    words = [sys.executable, "-m", "foundry", *overrides(name, steps)]
    subprocess.run(words, cwd=folder, env={**environment, "PYTHONPATH": str(root)}, check=True)


if __name__ == "__main__":
    TASKS.mkdir(exist_ok=True)
    continued = json.loads((TASKS / CONTINUED).read_text()) if (TASKS / CONTINUED).exists() else {}
    with tempfile.TemporaryDirectory(prefix="foundry-tasks-") as temporary:
        write_small_files(Path(temporary))
        for missing in (name for name in RUNS if not (TASKS / name).exists()):
            continued[missing] = write(missing, Path(temporary))
            (TASKS / CONTINUED).write_text(json.dumps(continued, indent=2) + "\n")
