"""`foundry eval run=DIR tasks=[...]`: evaluate a language model with lm_eval, EleutherAI's evaluation harness."""

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from foundry.commands.eval import EvalOptions
from foundry.config.packages import missing_message
from foundry.config.schemas.peft import LoRA
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation, format_reason, nearest

if TYPE_CHECKING:
    import torch
    from lm_eval.tasks import TaskManager

_HEAD = ("task", "samples", "shots", "metric", "value", "stderr")
_STDERR = "_stderr"


@dataclass(frozen=True, kw_only=True)
class TaskOptions(EvalOptions):
    """Options of the evaluation with lm_eval tasks."""

    tasks: list[str] = setting(
        "???", "tasks: names of lm_eval tasks, your own YAML files, or folders of them; needs lm_eval"
    )
    max_samples: int | None = setting(None, "samples per task; null: all", ge=1)
    num_fewshot: int | None = setting(None, "number of few-shot examples; null: the default of each task", ge=0)
    chat: bool = setting(False, "apply the model's chat template to the questions")


def measure(path: Path, options: TaskOptions, overrides: Sequence[str], compose: object) -> dict[str, Any]:
    """Evaluate a run with lm_eval, on the folder that `foundry.export` writes, so that anyone can reproduce the result.

    Args:
        path: run directory or transformers folder.
        options: options of the command.
        overrides: always empty.
        compose: unused.

    Raises:
        ConfigError: the run, checkpoint or task does not exist; lm_eval is not installed, or transformers does not
            support the model.
    """
    check_installed()
    tasks = find_tasks(options.tasks, trust=options.trust)
    import torch

    from foundry.commands.export import ExportOptions, export_checkpoint
    from foundry.config.record.frozen import load_config
    from foundry.parallel.device import choose_device
    from foundry.parallel.precision import PrecisionPolicy, fp32_arithmetic

    device, batch_size, amp, tf32 = choose_device(options.device), options.batch_size or 1, None, False
    with TemporaryDirectory(prefix="foundry-eval-") as temporary:
        folder, checkpoint = path, path.name
        if not (path / "config.json").is_file():
            config = load_config(path, trust=options.trust)
            precision = PrecisionPolicy.from_config(config.precision, device)
            amp, tf32 = precision.compute_dtype if precision.is_amp else None, config.precision.tf32
            batch_size = options.batch_size or config.hparams.per_gpu_batch_size
            folder = Path(temporary) / "export"
            export_options = ExportOptions(
                run=str(path),
                out=str(folder),
                which=options.which,
                ema=options.ema,
                trust=options.trust,
                device=options.device,
                merge=True if isinstance(config.peft, LoRA) else None,
            )
            checkpoint = export_checkpoint(export_options).name
        if not all((folder / name).is_file() for name in ("config.json", "tokenizer.json")):
            message = f"need a language model that transformers loads with a tokenizer, which {path} lacks"
            raise ConfigError(Violation("tasks", message))
        with torch.no_grad(), fp32_arithmetic(tf32=tf32):
            results = evaluate_tasks(folder, tasks, options, device=device, amp=amp, batch_size=batch_size)
    return {"checkpoint": checkpoint, "lm_eval": lm_eval_version(), "tasks": results}


def check_installed() -> None:
    """Check that lm_eval is installed, before a model is read.

    Raises:
        ConfigError: lm_eval is not installed.
    """
    if find_spec("lm_eval") is None:
        raise ConfigError(Violation("tasks", missing_message("lm_eval", "lm_eval")))


def find_tasks(names: Sequence[str], *, trust: bool) -> "tuple[TaskManager, list[str]]":
    """Return lm_eval's task manager and the selected tasks: names, or files that describe tasks.

    Only descriptions of tasks are read; lm_eval's own tasks are indexed only if a name may refer to one.

    Args:
        names: names of lm_eval's tasks, groups and tags; YAML files that describe a task; folders of YAML files.
        trust: whether to read files, whose functions and templates lm_eval runs.

    Raises:
        ConfigError: `names` is empty, a task does not exist, or a file is not trusted.
    """
    from lm_eval.tasks import TaskManager

    if not names:
        raise ConfigError(Violation("tasks", "is empty; name tasks of lm_eval, or files or folders that define tasks"))
    paths = {name: Path(name).expanduser() for name in names}
    folders = [path for path in paths.values() if path.is_dir()]
    missing_files = [name for name, path in paths.items() if path.suffix in (".yaml", ".yml") and not path.exists()]
    if missing_files:
        message = "which does not exist; give an existing file"
        raise ConfigError(Violation("tasks", f"has {name}, {message}") for name in missing_files)
    if not trust and (files := [name for name, path in paths.items() if path.exists()]):
        message = "whose functions and templates lm_eval would run; if you trust its author, add trust=true"
        raise ConfigError(Violation("tasks", f"has {name}, {message}") for name in files)
    needs_index = not all(path.exists() for path in paths.values())
    manager = TaskManager(include_path=folders or None, include_defaults=needs_index)
    task_names, violations = list[str](), list[Violation]()
    for name, path in paths.items():
        subtasks = TaskManager(include_path=path, include_defaults=False).all_subtasks if path.is_dir() else []
        if path.is_dir() and not subtasks:
            violations.append(Violation("tasks", f"has {name}, a folder without a YAML file that defines a task"))
        elif not path.exists() and name not in manager.task_index:
            message = f"has {name}, which is neither a folder nor a task of lm_eval{nearest(name, manager.all_tasks)}"
            violations.append(Violation("tasks", message))
        task_names += subtasks if path.is_dir() else [str(path)] if path.exists() else [name]
    if violations:
        raise ConfigError(violations)
    return manager, list(dict.fromkeys(task_names))


def evaluate_tasks(
    folder: Path,
    tasks: "tuple[TaskManager, list[str]]",
    options: TaskOptions,
    *,
    device: "torch.device",
    amp: "torch.dtype | None",
    batch_size: int,
) -> dict[str, Any]:
    """Evaluate a transformers folder with lm_eval's `hf` model and lm_eval's own seeds.

    Args:
        folder: folder with weights and tokenizer.
        tasks: result of `find_tasks`.
        options: options of the command.
        device: device of the model.
        amp: autocast dtype; None computes in the dtype of the weights.
        batch_size: number of requests in a batch.

    Returns:
        Results by task: `num_samples`, `num_fewshot`, `version`, and `metrics` by their names in lm_eval, with standard
            errors as `<metric>_stderr`.

    Raises:
        ConfigError: a task cannot be loaded, for example because its data is missing and cannot be downloaded.
    """
    import numpy
    import torch
    from lm_eval import evaluate
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED
    from lm_eval.models.huggingface import HFLM

    for name in ("lm_eval", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    random.seed(DEFAULT_RANDOM_SEED)
    numpy.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    manager, names = tasks
    try:
        loaded = manager.load(names)
    except Exception as error:  # from lm_eval, the library that reads the data, or the task's own code
        raise ConfigError(Violation("tasks", f"{', '.join(names)} cannot be read: {format_reason(error)}")) from error
    for task in loaded["tasks"].values():
        shots = task.get_config("num_fewshot")
        if shots is None or (shots and options.num_fewshot is not None):  # lm_eval keeps a 0 set by the task itself
            task.set_config(key="num_fewshot", value=options.num_fewshot or 0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
    model = HFLM(
        pretrained=str(folder), device=str(device), dtype="auto", mixed_precision_dtype=amp, batch_size=batch_size
    )
    try:
        measured = evaluate(
            model,
            loaded,
            limit=options.max_samples,
            apply_chat_template=options.chat,
            fewshot_as_multiturn=True,
            log_samples=False,
        )
    except ValueError as error:  # a requirement of a task, such as permission to run its code
        raise ConfigError(Violation("tasks", f"cannot be evaluated: {format_reason(error)}")) from error
    assert measured is not None
    return {name: _of_task(name, measured) for name in measured["results"]}


def lm_eval_version() -> str:
    """Return the version of lm_eval."""
    from importlib.metadata import version  # slow to import

    return version("lm_eval")


def _of_task(name: str, measured: Any) -> dict[str, Any]:
    """Return lm_eval's results for a task or group; a metric without a filter loses the ending `,none` of its key."""
    values = {key.removesuffix(",none"): value for key, value in measured["results"][name].items()}
    counts = measured.get("n-samples", {}).get(name, {})
    return {
        "num_samples": counts.get("effective"),
        "num_fewshot": measured.get("n-shot", {}).get(name),
        "version": measured.get("versions", {}).get(name),
        "metrics": {key: float(value) for key, value in values.items() if _is_number(value) and key != "sample_len"},
    }


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def table(tasks: dict[str, Any]) -> str:
    """Format the results as text, one line per metric."""
    rows: list[tuple[str, ...]] = [_HEAD]
    for name, task in tasks.items():
        for metric, value in task["metrics"].items():
            if _STDERR in metric:
                continue
            plain, mark, how = metric.partition(",")
            stderr = task["metrics"].get(f"{plain}{_STDERR}{mark}{how}")
            numbers = (task["num_samples"], task["num_fewshot"], metric, value, stderr)
            rows.append((name, *("" if n is None else f"{n:.4f}" if isinstance(n, float) else str(n) for n in numbers)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines) + "\n"
