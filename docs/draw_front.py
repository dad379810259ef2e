"""Draw the pictures and the badges of the README: `python docs/draw_front.py [RUN_DIR]`.

The left panel shows the errors of a command with three mistakes, from composing it; the right panel shows the losses of
the run in RUN_DIR. Without RUN_DIR, the curve of the current picture is kept. Values of badges come from setup.cfg.
"""

import configparser
import json
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

from foundry import ConfigError, compose
from foundry.run_dir.names import METRICS
from foundry.tracking.plot_style import BLUE, GREY, ORANGE

IMAGES = Path(__file__).resolve().parent / "images"
PICTURE = IMAGES / "front.svg"
COMMAND = "python -m foundry hparams.lrr=1 scheduler=wsdd hparams.global_batch_size=10"
NARROW = IMAGES / "front_narrow.svg"
_CURVE = re.compile(r"<g id=\"curve\">.*?</g>", re.DOTALL)
_WIDTH, _HEIGHT, _LEFT = 1000, 372, 560
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
_SANS = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def refusals() -> list[str]:
    """Return the error messages of `COMMAND`, one per line of its output."""
    try:
        compose(shlex.split(COMMAND.removeprefix("python -m foundry")))
    except ConfigError as error:
        return str(error).splitlines()
    raise AssertionError(f"{COMMAND} is not refused")


def read_losses(run_dir: Path) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Return (step, training loss) and (step, held-out loss) of the recorded steps of a run."""
    records = [json.loads(line) for line in (run_dir / METRICS).read_text(encoding="utf-8").splitlines()]
    return tuple([(one["step"], one[name]) for one in records if name in one] for name in ("loss", "val_loss"))  # type: ignore[return-value]


def curve(loss: Sequence[tuple[int, float]], held_out: Sequence[tuple[int, float]]) -> str:
    """Return the right panel as SVG: the losses of a run by step."""
    left, right, top, bottom = _LEFT + 66, _WIDTH - 34, 78, _HEIGHT - 56
    last, low, high = max(step for step, _ in loss), 3, 9

    def place(step: float, value: float) -> tuple[float, float]:
        return left + (right - left) * step / last, bottom - (bottom - top) * (value - low) / (high - low)

    parts = [_text(left - 42, 44, "python -m foundry", family=_MONO, size=14, weight="600")]
    for value in range(low, high + 1, 2):
        _, y = place(0, value)
        parts.append(f'<path d="M{left} {y:.1f}H{right}" stroke="#e5e7eb"/>')
        parts.append(_text(left - 10, y + 4, str(value), anchor="end", fill=GREY))
    for step in range(0, last + 1, last // 5):
        parts.append(_text(place(step, low)[0], bottom + 20, str(step), anchor="middle", fill=GREY))
    parts.append(_text((left + right) / 2, bottom + 40, "step", anchor="middle", fill=GREY))
    for name, series, colour in (("loss", loss, BLUE), ("held-out loss", held_out, ORANGE)):
        points = [place(*point) for point in series]
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        width = 1.5 if name == "loss" else 2.5
        parts.append(f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
        if name != "loss":
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>' for x, y in points]
        place_of_name = top + (12 if name == "loss" else 32)
        parts.append(f'<path d="M{right - 116} {place_of_name - 4}h16" stroke="{colour}" stroke-width="3"/>')
        parts.append(_text(right - 92, place_of_name, name))
    return f'<g id="curve">{"".join(parts)}</g>'


def picture(right: str, *, is_narrow: bool = False) -> str:
    """Return the picture as SVG, with the errors beside the right panel, or above it if `is_narrow`, for phones."""
    letters = 54 if is_narrow else 64
    lines = [(line, "#e5e7eb") for line in _wrapped("$ " + COMMAND, letters)]
    for refusal in refusals():
        key, _, message = refusal.partition(":")
        lines += [("", ""), (key + ":", "#fca5a5"), *((line, "#e5e7eb") for line in _wrapped(message.strip(), letters))]
    lines += [("", ""), ("exit code 2: nothing was started, nothing was written", "#9ca3af")]
    texts = [
        _text(26, 48 + 20 * number, line, family=_MONO, size=13, fill=colour)
        for number, (line, colour) in enumerate(lines)
        if line
    ]
    panel = _WIDTH - _LEFT - 4
    across, down, width, height, x, y, moved = _LEFT - 16, _HEIGHT - 8, _WIDTH, _HEIGHT, _LEFT, 4, ""
    if is_narrow:
        panel = across = panel + 40
        down = 56 + 20 * len(lines)
        width, height, x, y = across + 8, down + _HEIGHT + 8, 4, down + 12
        moved = f' transform="translate({24 - _LEFT} {down + 8})"'
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            "<title>Three errors of one command, each with its remedy, beside the loss of a run</title>",
            f'<rect x="4" y="4" width="{across}" height="{down}" rx="10" fill="#111827"/>',
            f'<rect x="{x}" y="{y}" width="{panel}" height="{_HEIGHT - 8}" rx="10" fill="#ffffff" stroke="#d1d5db"/>',
            *texts,
            f"<g{moved}>{right}</g>",
            "</svg>\n",
        ]
    )


def badges() -> dict[str, str]:
    """Return the SVG of each badge by file name."""
    setup = configparser.ConfigParser()
    setup.read(IMAGES.parents[1] / "setup.cfg")
    options = setup["options"]
    torch = next(line for line in options["install_requires"].splitlines() if line.startswith("torch>="))
    said = {
        "licence": setup["metadata"]["license"],
        "python": f"{options['python_requires'].removeprefix('>=')} or newer",
        "pytorch": f"{torch.removeprefix('torch>=')} or newer",
    }
    return {f"badge_{name}.svg": badge(name, value) for name, value in said.items()}


def badge(name: str, value: str) -> str:
    """Return a badge as SVG: a name and its value side by side."""
    left, right = (7 * len(text) + 14 for text in (name, value))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img">',
            f"<title>{name}: {value}</title>",
            f'<rect width="{left + right}" height="20" rx="4" fill="#374151"/>',
            f'<path d="M{left} 0h{right - 4}a4 4 0 0 1 4 4v12a4 4 0 0 1 -4 4h-{right - 4}z" fill="{BLUE}"/>',
            _text(left / 2, 14, name, size=11, fill="#ffffff", anchor="middle"),
            _text(left + right / 2, 14, value, size=11, fill="#ffffff", anchor="middle"),
            "</svg>\n",
        ]
    )


def kept_curve() -> str:
    """Return the right panel of the current picture."""
    return _CURVE.search(PICTURE.read_text(encoding="utf-8"))[0]  # type: ignore[index]


def _wrapped(text: str, letters: int) -> list[str]:
    return textwrap.wrap(text, letters, break_on_hyphens=False, subsequent_indent="  " if text.startswith("$") else "")


def _text(
    x: float,
    y: float,
    text: str,
    *,
    family: str = _SANS,
    size: int = 12,
    fill: str = "#111827",
    anchor: str = "start",
    weight: str = "400",
) -> str:
    style = f'font-family="{family}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" fill="{fill}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style} xml:space="preserve">{escape(text)}</text>'


def main(words: Sequence[str]) -> None:
    """Write the wide and the narrow picture and all badges."""
    right = curve(*read_losses(Path(words[0]))) if words else kept_curve()
    pictures = {PICTURE.name: picture(right), NARROW.name: picture(right, is_narrow=True)}
    for name, text in {**pictures, **badges()}.items():
        (IMAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
