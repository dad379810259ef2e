"""`README.md` of an export: model, data, recipe, final metrics, and the command that trained it."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import foundry
from foundry.config.composition.job_overrides import format_command, recorded_overrides
from foundry.config.record.frozen import plain
from foundry.core.model_hooks import hook
from foundry.engine.restore import RestoredRun
from foundry.run_dir.checkpoints import parse_step, step_name
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import EVALUATION, METRICS, MODEL_CARD, PLAN, RESULT
from foundry.run_dir.redact import masked, one_line
from foundry.run_dir.strict_json import DamagedFileError, flat, read_optional
from foundry.tracking.metrics_file import is_evaluation, read_step

_PLANNED = (
    "total_steps",
    "total_samples",
    "total_tokens",
    "tokens_per_sample",
    "world_size",
    "parameters",
    "trainable_parameters",
)
_GROUPS = ("model", "hparams", "optimizer", "scheduler", "objective", "peft", "precision")
_USES = {
    "transformers": """\
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{folder}")
""",
    "peft": """\
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

base = AutoModelForCausalLM.from_pretrained({base})
model = PeftModel.from_pretrained(base, "{folder}")
""",
    "safetensors": """\
from safetensors.torch import load_file

weights = load_file("{folder}/model.safetensors")
""",
}
_HOW_TO_MAKE_BASE = """\
# `python -m foundry.export run=RUN out=DIR base=BASE` writes the folder BASE
"""
_CHAT = """\
tokenizer = AutoTokenizer.from_pretrained("{folder}")
chat = [{{"role": "user", "content": "..."}}]
prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
"""
_TEXT = """\
tokenizer = AutoTokenizer.from_pretrained("{folder}")
prompt = tokenizer("...", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))
"""


def write_model_card(
    run_dir: Path,
    restored: RestoredRun,
    out: Path,
    *,
    library: str,
    base: Path | None = None,
) -> None:
    """Write README.md into an export; secrets are masked, and values missing from the run directory are omitted.

    Args:
        run_dir: run directory.
        restored: run, opened at the exported step.
        out: folder of the export.
        library: library that loads the export: peft for adapters, else transformers, or safetensors for models without
            a transformers config.
        base: for adapters, the transformers folder with their base; None without one.
    """
    settings = masked(plain(restored.config))
    plan, step = _read(run_dir / PLAN), parse_step(restored.checkpoint)
    is_text = library != "safetensors" and restored.data.tokenizer is not None
    use = _USES[library] + ("" if not is_text else _TEXT if restored.data.chat_template is None else _CHAT)
    base_name = json.dumps("BASE" if base is None else str(base))
    use = use if base is not None or library != "peft" else f"{_HOW_TO_MAKE_BASE}{use}"
    objective = str(settings["objective"].get("_target_", "")).rpartition(".")[2]
    planned = {name: plan[name] for name in _PLANNED if plan.get(name) is not None}
    recipe = {name: value for group in _GROUPS for name, value in _set_values(settings[group], group)}
    tags = ["foundry", *([objective.lower()] if objective else [])]
    parts = [
        f"---\nlibrary_name: {library}",  # https://huggingface.co/docs/hub/model-cards#model-card-metadata
        *(["pipeline_tag: text-generation"] if is_text else []),
        f"tags: {json.dumps(tags)}\n---\n",
        f"# {one_line(run_dir.resolve().name)}\n",
        f"{_architecture(restored.model)}, trained by `{objective}` with foundry {foundry.__version__}; step {step}.\n",
        f"## Use\n\n```python\n{use.format(folder=out.name, base=base_name)}```\n",
        _table("Data", dict(_set_values(settings["data"], "data")) | dict(flat(plan.get("notes") or {}))),
        _table("Recipe", planned | recipe),
        _table("Numbers", _numbers(run_dir, step)),
    ]
    if overrides := recorded_overrides(run_dir):
        parts.append(f"## Command\n\n```bash\n{format_command(overrides, ())}\n```\n")
    parts.append("All settings are in `config.yaml`.\n")
    write_atomically(out / MODEL_CARD, "\n".join(parts))


def _architecture(model: Any) -> str:
    hf_config = hook(model, "hf_config")
    return str(type(model).__name__ if hf_config is None else hf_config().architectures[0])


def _numbers(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the metrics of this step: from evaluations in the run, or else result.json, and from `foundry.eval`."""
    try:
        records = read_step(run_dir, step) if (run_dir / METRICS).is_file() else []
    except (OSError, ValueError):
        records = []
    metrics: dict[str, Any] = {"step": step}
    for record in records:
        if is_evaluation(record):
            metrics |= record
    if len(metrics) == 1 and (result := _read(run_dir / RESULT)).get("step") == step:
        metrics |= {name: result[name] for name in ("loss", "val_loss") if name in result}
    evaluation = _read(run_dir / EVALUATION)
    if evaluation.pop("checkpoint", None) == step_name(step):
        metrics |= {f"{name} (foundry.eval)": value for name, value in flat(evaluation)}
    return metrics if len(metrics) > 1 else {}


def _table(title: str, values: Mapping[str, Any]) -> str:
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *rows, ""]) if rows else ""


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


def _set_values(node: Mapping[str, Any], group: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a group, except null, false and empty ones; a part by the name of its class or function."""
    for name, value in flat(node, f"{group}."):
        if name.endswith("._target_"):
            yield name.removesuffix("._target_"), str(value).removesuffix(".from_durations").rpartition(".")[2]
        elif not any(value is default for default in (None, False, "")):
            yield name, value


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_optional(file)
    except DamagedFileError:
        return {}
