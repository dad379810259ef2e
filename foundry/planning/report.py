"""Output of a plan for users: schedule.csv, schedule.png and tables on the terminal."""

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from io import TextIOWrapper
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from rich.console import Console
from rich.markup import escape

from foundry.core.events import Phase, PlannedUpdate
from foundry.core.tasks import planned
from foundry.models.lora import count_by_kind
from foundry.planning.moments import MOMENTS
from foundry.run_dir.files import replaced_atomically
from foundry.run_dir.names import PLAN
from foundry.run_dir.outputs import Recognizer, has_columns, has_keys, is_picture
from foundry.tracking.humanize import count, duration
from foundry.tracking.plot_style import save_figure
from foundry.tracking.schedule_figure import schedule_figure

Sections = Sequence[tuple[str, Sequence[tuple[str, str]]]]
"""Titles of tables, each with the name and value of every row."""

CSV, PICTURE = "schedule.csv", "schedule.png"
"""Names of the files in a run directory."""
RECOGNIZERS: Mapping[str, Recognizer] = {
    PLAN: has_keys("total_steps", "phases"),
    CSV: has_columns(*(item.name for item in fields(PlannedUpdate))),
    PICTURE: is_picture,
}
"""Functions that recognize the files of an earlier plan by their content."""

_MEMORY_PARTS = {
    "weights": "weights",
    "frozen_weights": "of these, frozen",
    "gathered": "gathered weights (transient)",
    "gradients": "gradients",
    "reducing": "gradients in reduction (transient)",
    "optimizer": "optimizer state",
    "ema": "averaged weights",
    "frozen": "frozen models",
    "buffers": "buffers",
    "activations_estimated": "activations (estimate)",
    "generation": "generation of completions (transient)",
}


def write_csv(updates: Iterable[PlannedUpdate], folder: Path) -> Path:
    """Write schedule.csv with one row for each update; its numbers read back as the same floats."""
    path = folder / CSV
    with replaced_atomically(path) as stream:
        file = TextIOWrapper(stream, encoding="utf-8", newline="")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(item.name for item in fields(PlannedUpdate))
        writer.writerows(asdict(update).values() for update in updates)
        file.detach()  # flushes the buffer, and leaves the stream open
    return path


def write_picture(updates: Sequence[PlannedUpdate], phases: Sequence[Phase], folder: Path) -> Path:
    """Plot learning rate, weight decay and batch size of the updates in schedule.png."""
    path = folder / PICTURE
    save_figure(schedule_figure(updates, phases, run_name=folder.absolute().name), path)
    return path


def show(plan: Mapping[str, Any], console: Console) -> None:
    """Print the tables of a plan."""
    sections = (
        ("Step", _step_rows(plan)),
        ("Run", _run_rows(plan)),
        ("Rows", _row_lengths(plan["notes"])),
        ("Durations", [(key, text) for key, text in plan["durations"].items()]),
        ("Schedule", _schedule_rows(plan)),
        ("Batch size", _stage_rows(plan)),
        ("Memory per rank", _memory_rows(plan)),
    )
    show_sections(sections, console)


def show_sections(sections: Sections, console: Console) -> None:
    """Print tables of two columns with equal widths; tables without rows are skipped."""
    width = max(len(name) for _, rows in sections for name, _ in rows)
    for title, rows in sections:
        if rows:
            console.print(title, style="bold")
        for name, value in rows:
            console.print(f"  [dim]{name:<{width}}[/dim]  {escape(value)}")


def num_bytes(value: float) -> str:
    """Format a number of bytes: 1234567890 becomes 1.15 GiB."""
    for factor, suffix in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:.4g} {suffix}"
    return f"{value:.0f} B"


def _step_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    size, tokens = plan["global_batch_size"], plan["tokens_per_step"]
    ranks = f"{plan['world_size']} rank{'s' * (plan['world_size'] > 1)}"
    product = f"{plan['per_gpu_batch_size']} per rank x {ranks} x {plan['accum_freq']} accumulated"
    packing = plan.get("packing")
    return [
        ("ranks", f"{plan['world_size']} ({plan['strategy']}), {plan['precision']}, {plan['device']}"),
        ("samples per step", f"{product} = {size}" if packing is None else f"{size}"),
        *([] if packing is None else [("packed rows per step", _packing(packing))]),
        *(resolve_name(entry.row)(plan[name]) for name, entry in planned().items() if plan.get(name) is not None),
        *([] if tokens is None else [("tokens per step", f"{plan['tokens_per_sample']} x {size} = {tokens:,}")]),
    ]


def _packing(packing: Mapping[str, Any]) -> str:
    if packing["efficiency"] is None:
        return f"of {packing['row_tokens']:,} tokens; their number depends on the completions"
    usage = f"{packing['efficiency']:.1%} of them useful (first {packing['steps']} steps)"
    return f"{packing['rows_per_step']:.4g} of {packing['row_tokens']:,} tokens, {usage}"


def _run_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [
        ("steps", f"{plan['total_steps']:,}"),
        ("samples", f"{plan['total_samples']:,}"),
        *([] if plan["total_tokens"] is None else [("tokens", f"{plan['total_tokens']:,}")]),
        ("epochs", f"{plan['total_epochs']:.4g} of {plan['samples_per_epoch']:,} samples"),
        ("steps per epoch", f"{plan['steps_per_epoch']:.6g}"),
        ("parameters", f"{plan['parameters']:,} ({count(plan['parameters'])})"),
    ]
    if plan["trainable_parameters"] != plan["parameters"]:
        share = plan["trainable_parameters"] / plan["parameters"]
        rows.append(("trainable", f"{plan['trainable_parameters']:,} ({share:.2%})"))
    if plan["adapters"]:
        rows.append(("adapters", f"{count_by_kind(plan['adapters'])}, the first {plan['adapters'][0]}"))
    if plan["checkpoint_bytes"] is not None:
        rows.append(("checkpoint", num_bytes(plan["checkpoint_bytes"])))
    if plan.get("run_seconds") is not None:
        step = f"{plan['step_seconds']:.4g} s a step of {plan['global_batch_size']} samples"
        rows.append(("run length", f"{duration(plan['run_seconds'])} at {step}"))
    return rows


def _row_lengths(notes: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows on the sample lengths and on padding; empty for data with samples of equal length."""
    if "padding_train_tokens" in notes:
        padding, total = notes["padding_train_tokens"], notes["train_tokens"]
        return [("padding", f"{padding:,} tokens, {padding / (padding + total):.2%} of the training rows")]
    if "row_tokens" not in notes:
        return []
    skipped = [f"{count:,} {kind}" for kind, count in notes["skipped_rows"].items()]
    lengths = ", ".join(f"{name} {tokens:,}" for name, tokens in notes["row_tokens"].items())
    trained_share = f"; {notes['trained_share']:.1%} of them are trained on" if "trained_share" in notes else ""
    return [
        ("rows", f"{notes['train_rows']:,} for training, {notes['validation_rows']:,} for validation"),
        *([("skipped", ", ".join(skipped))] if skipped else []),
        ("tokens per row", lengths + trained_share),
    ]


def _schedule_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    lr, decay = plan["lr"], plan["weight_decay"]
    return [
        *((p["name"], f"steps {p['first_step']:,} to {p['last_step']:,}") for p in plan["phases"]),
        ("learning rate", f"first {lr['first']:.4g}, highest {lr['highest']:.4g}, last {lr['last']:.4g}"),
        ("weight decay", f"first {decay['first']:.4g}, last {decay['last']:.4g}"),
    ]


def _stage_rows(plan: Mapping[str, Any], max_rows: int = 12) -> list[tuple[str, str]]:
    """Return the stages of a batch size ramp, with the middle of a long ramp omitted; empty for a constant size."""
    stages = plan["batch_stages"]
    if len(stages) == 1:
        return []
    rows = [
        (f"from step {s['first_step']:,}", f"{s['global_batch_size']} samples, {s['accum_freq']} accumulated")
        for s in stages
    ]
    return (
        rows
        if len(rows) <= max_rows
        else [*rows[: max_rows // 2], ("...", f"{len(rows) - max_rows} more"), *rows[-max_rows // 2 :]]
    )


def _memory_rows(plan: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return rows with the nonzero parts of the memory, the peak, and the available memory."""
    memory = plan["memory"]
    rows = [
        (name, "unknown" if memory[key] is None else num_bytes(memory[key]))
        for key, name in _MEMORY_PARTS.items()
        if memory[key] != 0
    ]
    if memory["host"]:
        rows.append(("of these in host memory", num_bytes(memory["host"])))
    if memory["note"] is not None:
        rows.append(("note", memory["note"]))
    rows.append(("peak", f"{num_bytes(memory['total'])}, {MOMENTS[memory['peak']]}"))
    if memory["usable"] is not None:
        rows.append(("available on a device", num_bytes(memory["usable"])))
    return rows
