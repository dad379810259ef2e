"""Write the tables and charts of docs/benchmarks.md and the short table of README.md: `python benchmarks/page.py`.

Text between two markers comes from the records in benchmarks/results; all other text is written by hand and not
changed. A missing record is shown as not measured yet.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

from records import RESULTS, ROOT, Record

from foundry.tracking.plot_style import BLUE, GREY, blank, save_figure

PAGE, README = ROOT / "docs" / "benchmarks.md", ROOT / "README.md"
IMAGES = ROOT / "docs" / "images"
END = "<!-- end -->"
README_RECORDS = ("throughput", "memory", "startup", "finetuning_trl", "resume_fidelity")
"""Records whose headlines README shows: speed and memory of training and fine-tuning, and resumed runs."""
_BLOCK = re.compile(rf"<!-- benchmarks/results/(\w+)\.json -->\n.*?{END}", re.DOTALL)
_SHORT = re.compile(rf"<!-- benchmarks/results -->\n.*?{END}", re.DOTALL)


def read_records(folder: Path = RESULTS) -> dict[str, Record]:
    """Return all records of a folder, by name."""
    return {path.stem: Record.from_json(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))}


def page_with_tables(text: str, records: Mapping[str, Record]) -> str:
    """Return the page with the current tables of the records between its markers."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        parts = [_section(records[name])] if name in records else ["Not measured yet."]
        return "\n\n".join([f"<!-- benchmarks/results/{name}.json -->", *parts, END])

    return _BLOCK.sub(block, text)


def readme_with_table(text: str, records: Mapping[str, Record]) -> str:
    """Return README with a new short table: the headlines of `README_RECORDS`, in that order."""
    lines = ["| | foundry | compared with |", "|---|---|---|"]
    for name in README_RECORDS:
        if name in records:
            lines += [f"| {item.what} | {item.foundry} | {item.beside} |" for item in records[name].headlines]
    return _SHORT.sub(lambda _: "\n\n".join(["<!-- benchmarks/results -->", "\n".join(lines), END]), text)


def _section(record: Record) -> str:
    """Return origin, table, notes and chart of a record as Markdown."""
    parts = [_wrapped(record.origin() + "."), record.table(), *map(_wrapped, record.notes)]
    if record.chart:
        heading = _column(record)
        parts.append(f"![{heading} by side](images/{image_name(record)})")
    return "\n\n".join(parts)


def image_name(record: Record) -> str:
    """Return the name of a record's chart in docs/images."""
    return f"benchmark_{record.name}.png"


def draw(record: Record, file: Path) -> None:
    """Draw bars of the charted column: a group for each case, foundry's in color, lines from minimum to maximum."""
    heading, bars = _column(record), list[tuple[str, Sequence[float] | None, bool]]()
    for row in record.rows:
        values = row.values.get(record.chart)
        if values is None or isinstance(values, str):
            continue
        if row.case and row.case not in (name for name, values, _ in bars if values is None):
            bars.append((row.case, None, False))
        bars.append((row.side.replace("`", ""), values, "foundry" in row.side))
    height = 0.8 + 0.27 * len(bars)
    figure = blank((8, height), bottom=0.6 / height, top=0.97)
    figure.subplots_adjust(left=0.03 + 0.0095 * max(len(name) for name, _, _ in bars))
    axes = figure.add_subplot()
    for place, (_, values, is_own) in enumerate(bars):
        if values is not None:
            middle = median(values)
            axes.barh(place, middle, color=BLUE if is_own else GREY, height=0.72)
            axes.plot([min(values), max(values)], [place, place], color="black", linewidth=1.0)
    axes.set_yticks(range(len(bars)), [name for name, _, _ in bars])
    for label, (_, values, _) in zip(axes.get_yticklabels(), bars, strict=True):
        label.set_fontweight("bold" if values is None else "normal")
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.set_xlabel(heading)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", alpha=0.25, linewidth=0.6)
    save_figure(figure, file)


def _column(record: Record) -> str:
    """Return the heading of the charted column."""
    return next(column.heading for column in record.columns if column.key == record.chart).replace("`", "")


def _wrapped(text: str, width: int = 120) -> str:
    """Wrap a paragraph at the width of the documentation, but not within code."""
    words, lines = re.findall(r"`[^`]*`\S*|\S+", text), [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def main() -> None:
    """Write the pages and the charts."""
    records = read_records()
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8"), records), encoding="utf-8")
    README.write_text(readme_with_table(README.read_text(encoding="utf-8"), records), encoding="utf-8")
    for record in records.values():
        if record.chart:
            draw(record, IMAGES / image_name(record))


if __name__ == "__main__":
    main()
