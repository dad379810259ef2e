"""`README.md` of an export: model, data, recipe, final metrics, and the command that trained it."""

import json
from collections.abc import Iterable, Iterator, Mapping
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
from foundry.run_dir.strict_json import DamagedFileError, read_object
from foundry.tracking.metrics_file import is_evaluation, read_step

_PLANNED = {
    "total_steps": "steps of the whole run",
    "total_samples": "samples of the whole run",
    "total_tokens": "tokens of the whole run",
    "tokens_per_sample": "tokens per sample",
    "world_size": "processes",
    "parameters": "parameters",
    "trainable_parameters": "trained parameters",
}
_GROUPS = ("hparams", "optimizer", "scheduler", "objective", "peft", "precision")
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
        library: library that loads the export: transformers, peft, or safetensors for models that these do not support.
        base: for adapters, the transformers folder with their base; None without one.
    """
    settings = masked(plain(restored.config))
    plan, step = _read(run_dir / PLAN), parse_step(restored.checkpoint)
    is_text = library != "safetensors" and restored.data.tokenizer is not None
    use = _USES[library] + ("" if not is_text else _TEXT if restored.data.chat_template is None else _CHAT)
    base_name = json.dumps("BASE" if base is None else str(base))
    use = use if base is not None or library != "peft" else f"{_HOW_TO_MAKE_BASE}{use}"
    objective = str(settings["objective"].get("_target_", "")).rpartition(".")[2]
    parts = [
        _front_matter(library, objective, is_text=is_text),
        f"# {one_line(run_dir.resolve().name)}\n",
        f"{_architecture(restored.model)}, trained by `{objective}` with foundry {foundry.__version__}; step {step}.\n",
        *_section("Use", [f"```python\n{use.format(folder=out.name, base=base_name)}```\n"]),
        *_section("Data", _table(dict(_set_values(settings["data"], "data")) | dict(_leaves(plan.get("notes") or {})))),
        *_section("Recipe", _table(_plan_values(plan) | dict(_recipe(settings)))),
        *_section("Numbers", _table(_numbers(run_dir, step))),
        *_section("Command", _command(run_dir)),
        "All settings are in `config.yaml`.\n",
    ]
    write_atomically(out / MODEL_CARD, "\n".join(parts))


def _architecture(model: Any) -> str:
    hf_config = hook(model, "hf_config")
    return str(type(model).__name__ if hf_config is None else hf_config().architectures[0])


def _front_matter(library: str, objective: str, *, is_text: bool) -> str:
    """Return the card's metadata for the hub: https://huggingface.co/docs/hub/model-cards#model-card-metadata."""
    lines = [f"library_name: {library}", *(["pipeline_tag: text-generation"] if is_text else [])]
    return "\n".join(
        ["---", *lines, "tags:", "- foundry", *([f"- {objective.lower()}"] if objective else []), "---", ""]
    )


def _plan_values(plan: Mapping[str, Any]) -> dict[str, Any]:
    return {name: plan[key] for key, name in _PLANNED.items() if plan.get(key) is not None}


def _recipe(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings that determined the weights, by their names in the configuration."""
    model = settings["model"]
    if start := model.get("init_from") or model.get("path"):
        yield "starts from", start
    for group in _GROUPS:
        yield from _set_values(settings[group], group)


def _numbers(run_dir: Path, step: int) -> dict[str, Any]:
    """Return the metrics at this step from the run and `foundry.eval`; without any, the run's final loss."""
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
        metrics |= {f"{name} (foundry.eval)": value for name, value in _leaves(evaluation)}
    return metrics if len(metrics) > 1 else {}


def _command(run_dir: Path) -> list[str]:
    overrides = recorded_overrides(run_dir)
    return [f"```bash\n{format_command(overrides, ())}\n```\n"] if overrides else []


def _section(title: str, body: Iterable[str]) -> list[str]:
    lines = list(body)
    return [f"## {title}\n", *lines] if lines else []


def _table(values: Mapping[str, Any]) -> list[str]:
    rows = [f"| {_cell(name)} | {_cell(value)} |" for name, value in values.items()]
    return ["\n".join(["| | |", "|---|---|", *rows, ""])] if rows else []


def _cell(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return one_line(text).replace("|", "\\|").replace("<", "&lt;")


def _set_values(node: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a group that are set; a part is described by the name of its class or function."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from _set_values(value, f"{name}.{key}")
        elif key == "_target_" and value:
            yield name, str(value).removesuffix(".from_durations").rpartition(".")[2]
        elif not any(value is default for default in (None, False, "")):
            yield f"{name}.{key}", value


def _leaves(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _read(file: Path) -> dict[str, Any]:
    try:
        return read_object(file)
    except (FileNotFoundError, DamagedFileError):
        return {}
