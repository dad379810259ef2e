"""Progress on the terminal: a progress bar, or plain lines if the output is not a terminal."""

import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from foundry.core.events import Evaluated, RunEnded, RunStarted, StepLogged
from foundry.core.tasks import installed_tasks
from foundry.run_dir.names import LOG, PLOTS
from foundry.run_dir.redact import one_line, printable
from foundry.tracking.humanize import count, duration, number
from foundry.tracking.mlflow.destination import local_page, viewing_hint
from foundry.tracking.safe_observer import tolerant

_BAR_WIDTH = 16


class Progress:
    """Observer that prints the progress of a run for a person.

    Args:
        console: rich console to print to; None for standard output.
    """

    def __init__(self, *, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._is_terminal = self._console.is_terminal and not self._console.is_dumb_terminal
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._start_event: RunStarted | None = None
        self._start_time = time.monotonic()
        self._total: int | None = None
        self._last_step: StepLogged | None = None
        self._metric_value: float | None = None

    @tolerant
    def on_start(self, event: RunStarted) -> None:
        """Print the header of the run."""
        self._start_event, self._start_time = event, time.monotonic()
        self._total = event.plan.get("total_steps")
        self._say(header(event))
        if self._is_terminal:
            self._bar = Bar(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(bar_width=_BAR_WIDTH),
                TextColumn("{task.fields[numbers]}"),
                console=self._console,
                refresh_per_second=4,
            )
            self._task = self._bar.add_task("", total=self._total, completed=event.step, numbers="")
            self._bar.start()

    @tolerant
    def on_step(self, event: StepLogged) -> None:
        """Print the numbers of the step, or show them beside the progress bar."""
        self._last_step = event
        metric_text = None
        if self._bar is not None and self._metric is not None and self._metric_value is not None:
            metric_text = f"{_label(self._metric, short=True)} {number(self._metric_value)}"
        numbers = step_numbers(event, self._total, metric_text)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=event.step, numbers=self._fit(numbers))
            return
        total = "" if self._total is None else f"/{self._total}"
        width = len(str(self._total or "")) or 6
        self._line("  ".join([f"step {event.step:>{width}}{total}", *numbers]))

    @tolerant
    def on_evaluation(self, event: Evaluated) -> None:
        """Print the metrics of the evaluation, and the path of the samples."""
        self._metric_value = event.metrics.get(self._metric or "")
        parts = [f"step {event.step}"]
        parts += [f"{_label(name)} {number(float(value))}" for name, value in event.metrics.items()]
        if event.samples_file is not None:
            parts.append(f"samples {event.samples_file}")
        self._line("  ".join(parts))

    @tolerant
    def on_end(self, event: RunEnded) -> None:
        """Stop the bar, and print the outcome of the run and where to find its results."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._say(self._summary(event))

    def _fit(self, numbers: list[str]) -> str:
        """Join as many of the numbers as fit on the line beside the progress bar, at least one."""
        width = self._console.width - _BAR_WIDTH - len("step ") - 2 * len(str(self._total)) - 4
        while len(numbers) > 1 and len("  ".join(numbers)) > width:
            numbers = numbers[:-1]
        return "  ".join(numbers)

    def _summary(self, event: RunEnded) -> dict[str, str]:
        rows = {event.state: event.reason or f"after {duration(time.monotonic() - self._start_time)}"}
        loss = event.result.get("loss", self._last_step.loss if self._last_step else None)
        metric_value = event.result.get(self._metric or "", self._metric_value)
        if loss is not None:
            rows["final loss"] = number(loss)
        if metric_value is not None and self._metric is not None:
            rows[_label(self._metric)] = number(metric_value)
        if self._start_event is not None:
            if (entropy := unigram_entropy(self._start_event.plan)) is not None:
                rows["unigram entropy"] = f"{entropy:.4f}  (loss from token frequencies alone)"
            rows["run directory"] = str(self._start_event.run_dir)
            rows |= result_paths(self._start_event)
            if event.state == "failed":
                rows["traceback"] = str(self._start_event.run_dir / LOG)
        return rows

    @property
    def _metric(self) -> str | None:
        return None if self._start_event is None else self._start_event.metric

    def _say(self, rows: Mapping[str, str]) -> None:
        """Print a block of names and values."""
        rows = {name: one_line(value) for name, value in rows.items()}
        if not self._is_terminal:
            width = max(map(len, rows), default=0)
            for name, value in rows.items():
                self._line(f"{name:<{width}}  {value}")
            return
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold cyan", no_wrap=True)
        table.add_column(overflow="fold")
        for name, value in rows.items():
            table.add_row(name, value)
        self._console.print(table, markup=False)

    def _line(self, text: str) -> None:
        text = text if text.isprintable() and "=" not in text else printable(text)
        if self._is_terminal:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
            return
        self._console.file.write(f"{text}\n")  # not with rich, which takes 0.3 ms even for a line without styles
        self._console.file.flush()


def header(event: RunStarted) -> dict[str, str]:
    """Return the rows of the header by name. Rows whose values are unknown are left out."""
    plan, hparams = event.plan, event.config.get("hparams") or {}
    rows: dict[str, str] = {}
    precision = plan.get("precision") or (event.config.get("precision") or {}).get("mode")
    devices = event.devices or plan.get("device")
    if parts := [str(part) for part in (devices, getattr(precision, "value", precision)) if part]:
        rows["device"] = ", ".join(parts)
    if (parameters := plan.get("parameters")) is not None:
        trainable = plan.get("trainable_parameters", parameters)
        rows["parameters"] = count(parameters) + ("" if trainable == parameters else f", {count(trainable)} trainable")
    factors = (plan.get("world_size"), hparams.get("per_gpu_batch_size"), plan.get("accum_freq"))
    if all(isinstance(factor, int) for factor in factors):
        world_size, batch, accum_freq = (int(factor) for factor in factors if factor is not None)
        samples = plan.get("global_batch_size", hparams.get("global_batch_size", world_size * batch * accum_freq))
        ranks = f"{world_size} rank{'' if world_size == 1 else 's'}"
        rows["batch"] = f"{ranks} x {batch} per rank x {accum_freq} accumulated = {samples} samples per step"
        if tokens := plan.get("tokens_per_sample"):
            rows["batch"] += f", {count(samples * tokens)} tokens"
    if (steps := plan.get("total_steps")) is not None:
        total = plan.get("total_samples")
        rows["length"] = f"{steps} step{'' if steps == 1 else 's'}" + (
            "" if total is None else f", {count(total)} samples"
        )
    if event.step > 0:
        rows["continues"] = f"after step {event.step}"
    return rows | {"run directory": str(event.run_dir)}


def _label(metric: str, *, short: bool = False) -> str:
    """Return the display name of a metric."""
    return metric if metric != "val_loss" else "held-out" if short else "held-out loss"


def step_numbers(event: StepLogged, total: int | None, metric_text: str | None) -> list[str]:
    """Format the numbers of a logged step.

    Args:
        event: the logged step.
        total: optimizer steps of the run; None omits the remaining time.
        metric_text: name and value of the run's metric; None omits them.
    """
    if event.tokens_per_second is not None:
        speed = f"{count(event.tokens_per_second)} tokens/s"
    else:
        speed = f"{count(event.samples_per_second)} samples/s"
    numbers = [f"loss {number(event.loss)}"]
    if total is not None:
        numbers.insert(0, f"ETA {duration((total - event.step) * event.step_seconds)}")
    if metric_text is not None:
        numbers.append(metric_text)
    numbers += [f"lr {event.lr:.2e}", speed]
    if event.mfu is not None:
        numbers.append(f"MFU {event.mfu:.1%}")
    return numbers


def unigram_entropy(plan: Mapping[str, Any]) -> float | None:
    """Return the loss in nats of a model that knows only token frequencies; None if the plan does not contain it."""
    notes = plan.get("notes")
    value = notes.get("unigram_entropy") if isinstance(notes, Mapping) else None
    return float(value) if value is not None else None


def result_paths(event: RunStarted) -> dict[str, str]:
    """Return, by name, the paths of figures and samples, and the page or command that shows the run in MLflow."""
    rows: dict[str, str] = {}
    plots = event.run_dir / PLOTS
    task_pictures = (picture for task in installed_tasks() for picture in task.pictures)
    pictures = ("loss.png", "metrics.png", "norms.png", "schedule.png", *task_pictures, "samples.*")
    for name in pictures:
        label = name.partition(".")[0]
        for path in sorted(plots.glob(name)):
            rows[label] = str(path)
    tracking = event.config.get("tracking") or {}
    if tracking.get("mlflow"):
        rows["MLflow"] = viewing_hint(event.run_dir, tracking.get("uri"))
        if (page := local_page(event.run_dir, tracking.get("uri"))) is not None:
            rows["runs in MLflow"] = page
    return rows
