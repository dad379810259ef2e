"""`foundry coordinates [overrides]`: check that the size of updates does not depend on the width of the model.

Trains the composed run for a few steps at each of several widths, with the rate hparams.lr and at a fixed head size,
and measures how much the output of each layer changes (the coordinate check of Yang et al. 2022, arXiv:2203.03466,
appendix D.1). With model.parametrization=mup the changes should be equal at all widths; then a learning rate that is
best for a narrow model is also close to the best one for a wide model. Only a picture and the numbers are saved.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.commands.composed_command import run_composed
from foundry.config.command import Outcome, check_output, print_path
from foundry.config.environment import detect
from foundry.config.schemas.model import WidthSettings
from foundry.config.schemas.root import Config
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import STATUS
from foundry.run_dir.outputs import has_keys, is_picture
from foundry.run_dir.strict_json import encode

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from foundry.engine.layer_outputs import Activity

_PREFIX = "coordinates."
NUMBERS, PICTURE = "coordinates.json", "coordinates.png"


def _default_widths() -> list[int]:
    return [64, 128, 256, 512]


@dataclass(frozen=True, kw_only=True)
class CoordinatesOptions:
    """Options of the coordinate check."""

    widths: list[int] = setting(_default_widths, "values of model.hidden_size, ascending, at least two")
    steps: int = setting(4, "optimizer steps at each width", ge=1, le=1000)
    tolerance: float = setting(
        0.2, "largest slope of log(change) over log(width) that counts as independent of the width", gt=0
    )


@dataclass(frozen=True)
class Layer:
    """Measurements of a layer: a list for each width, with a value before the first step and after each step.

    Attributes:
        sizes: mean absolute values of the output.
        changes: mean absolute changes of the output since the first value.
    """

    sizes: Sequence[Sequence[float]]
    changes: Sequence[Sequence[float]]


@dataclass(frozen=True)
class CoordinateCheck:
    """Result of a coordinate check.

    Attributes:
        parametrization: `model.parametrization` of the run.
        learning_rate: rate of all steps.
        widths: values of `model.hidden_size`.
        tolerance: largest slope that counts as independent of the width.
        layers: measurements by the name of the layer, in the order of the forward pass.
    """

    parametrization: str
    learning_rate: float
    widths: Sequence[int]
    tolerance: float
    layers: dict[str, Layer]

    @property
    def num_steps(self) -> int:
        """Number of optimizer steps at each width."""
        return len(next(iter(self.layers.values())).changes[0]) - 1

    def slopes(self, name: str) -> list[float | None]:
        """Return the slope of log(change) over log(width) after each step; None if the output has not changed."""
        changes = self.layers[name].changes
        return [fit_slope(self.widths, [values[step] for values in changes]) for step in range(1, self.num_steps + 1)]

    @property
    def steepest(self) -> tuple[float, str, int] | None:
        """Slope, layer and step with the largest dependence on the width; None if no layer changes.

        Slopes below 0 count after the last step only: in the first steps, changes in random directions, which shrink as
        1 / sqrt(width), may exceed the others.
        """
        found = [(slope, name, step) for name in self.layers for step, slope in enumerate(self.slopes(name), 1)]
        counted = [(s, name, step) for s, name, step in found if s is not None and (s > 0 or step == self.num_steps)]
        return max(counted, key=lambda entry: round(abs(entry[0]), 2), default=None)

    @property
    def is_independent(self) -> bool:
        """Whether the steepest slope is at most the tolerance."""
        return self.steepest is None or abs(self.steepest[0]) <= self.tolerance

    @property
    def verdict(self) -> str:
        """One line: whether the changes depend on the width, and the steepest slope."""
        if self.steepest is None:
            return "no layer changes"
        slope, name, step = self.steepest
        found = f"the steepest slope is {slope:+.2f} ({name}, step {step})"
        if self.is_independent:
            return f"independent of the width: {found}, at most {self.tolerance:g}"
        return f"dependent on the width: {found}, above {self.tolerance:g}"

    def numbers(self) -> dict[str, Any]:
        """Return the content of coordinates.json."""
        content = asdict(self)
        for name in self.layers:
            content["layers"][name]["slopes"] = self.slopes(name)
        return {**content, "is_independent": self.is_independent, "verdict": self.verdict}

    def table(self) -> str:
        """Return a table as text: changes after the last step, their slope, and the largest slope of all steps."""
        rows = [["layer", *map(str, self.widths), "slope", "largest"]]
        for name, layer in self.layers.items():
            slopes = self.slopes(name)
            largest = max((slope for slope in slopes if slope is not None), default=None)
            texts = ["" if slope is None else f"{slope:+.2f}" for slope in (slopes[-1], largest)]
            rows.append([name, *(f"{values[-1]:.2e}" for values in layer.changes), *texts])
        lengths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            [row[0].ljust(lengths[0]), *(c.rjust(n) for c, n in zip(row[1:], lengths[1:], strict=True))] for row in rows
        )
        return "".join("  ".join(line) + "\n" for line in lines)


def fit_slope(widths: Sequence[float], values: Sequence[float]) -> float | None:
    """Return the slope of the least-squares line of log(value) over log(width); None if a value is 0."""
    if not all(value > 0 for value in values):
        return None
    xs, ys = [math.log(width) for width in widths], [math.log(value) for value in values]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def check_coordinates(config: Config, options: CoordinatesOptions, run_dir: Path) -> CoordinateCheck:
    """Train at each width, write the result into the run directory, and print a table and the verdict.

    Args:
        config: configuration of the run; its schedule, budget, checkpoints and evaluations are ignored, and it is not
            compiled.
        options: options of the check.
        run_dir: directory without a run.

    Raises:
        ConfigError: the model cannot be built at a width, the run needs several processes or trains on completions, the
            loss is not finite, or the run directory contains a run.
    """
    models = _models(config, options)
    if (processes := detect().num_processes(config.distributed.nproc_per_node)) > 1:
        message = f"is {processes} but the coordinate check runs in one process; set it to 1"
        raise ConfigError(Violation("distributed.nproc_per_node", message))
    if (run_dir / STATUS).exists():
        raise ConfigError(Violation("hydra.run.dir", f"is {run_dir}, which holds a run; choose another"))
    for name, is_earlier in ((NUMBERS, has_keys("widths", "layers")), (PICTURE, is_picture)):
        check_output(name, run_dir / name, is_earlier=is_earlier)
    hparams = replace(config.hparams, torchcompile=False)
    measured = [measure(replace(config, model=model, hparams=hparams), options.steps, run_dir) for model in models]
    layers = {
        name: Layer(
            sizes=[[activities[name].size for activities in steps] for steps in measured],
            changes=[[activities[name].change for activities in steps] for steps in measured],
        )
        for name in measured[0][0]
    }
    result = CoordinateCheck(
        models[0].parametrization.value, config.hparams.lr, options.widths, options.tolerance, layers
    )
    _report(result, run_dir)
    return result


def _models(config: Config, options: CoordinatesOptions) -> list[WidthSettings]:
    """Return the settings of the model at each width.

    Raises:
        ConfigError: the widths are not ascending, or the model cannot have one of them.
    """
    model, key = config.model, f"{_PREFIX}widths"
    text = f"is [{','.join(map(str, options.widths))}]"
    if not isinstance(model, WidthSettings) or not model.supports_mup:
        message = f"is {type(model).__name__}, whose width cannot be varied; choose model=transformer or model=dit"
        raise ConfigError(Violation("model", message))
    if model.init_from is not None:
        message = f"is {model.init_from} but its weights have one width only; set it to null"
        raise ConfigError(Violation("model.init_from", message))
    if len(options.widths) < 2 or options.widths[0] < 1 or any(a >= b for a, b in pairwise(options.widths)):
        raise ConfigError(Violation(key, f"{text} but must be two or more ascending widths, such as [64,128,256]"))
    models, violations = list[WidthSettings](), list[Violation]()
    for width in options.widths:
        try:
            models.append(model.at_width(width))
        except ValueError as error:
            violations.append(Violation(key, f"has {width} but {error}"))
        else:
            violations += [Violation(key, f"has {width}, with which {v.key} {v.message}") for v in models[-1].check()]
    if violations:
        raise ConfigError(violations)
    return models


def measure(config: Config, num_steps: int, run_dir: Path) -> list[dict[str, "Activity"]]:
    """Train for some steps; return the activity of each layer before the first step and after each step.

    Args:
        config: configuration of the run at one width.
        num_steps: number of optimizer steps, with the rate hparams.lr.
        run_dir: directory without a run.

    Raises:
        ConfigError: a part cannot be built, the objective trains on completions, or the loss is not finite.
    """
    from foundry.engine.layer_outputs import LayerOutputs
    from foundry.engine.short_training import short_training

    width, rate, losses = config.model.hidden_size, config.hparams.lr, list[float]()
    reason = "trains on completions, which the coordinate check cannot repeat; choose objective=next_token or sft"
    with short_training(config, run_dir, generation=reason) as training:
        window = training.next_window()
        outputs = LayerOutputs(training, window.microbatches[0])
        measured = [outputs.measure()]
        for step in range(1, num_steps + 1):
            loss = training.take_step(window if step == 1 else training.next_window(), rate, step)
            if loss is None:
                message = f"is {rate:g} but the loss at model.hidden_size={width} is not finite in step {step}"
                raise ConfigError(Violation("hparams.lr", f"{message}; lower it"))
            losses.append(loss)
            measured.append(outputs.measure())
    sys.stdout.write(f"width {width}: loss {losses[0]:.4f} in step 1, {losses[-1]:.4f} in step {num_steps}\n")
    sys.stdout.flush()
    return measured


def _report(result: CoordinateCheck, run_dir: Path) -> None:
    from foundry.tracking.plot_style import save_figure

    write_atomically(run_dir / NUMBERS, encode(result.numbers()) + "\n")
    save_figure(coordinate_figure(result, run_dir.name), run_dir / PICTURE)
    head = f"mean absolute change of the output after step {result.num_steps}, by width; largest: slope of any step"
    sys.stdout.write(f"\n{head}\n{result.table()}\n")
    print_path(run_dir / PICTURE, "picture  ")
    sys.stdout.write(f"verdict  {result.parametrization}: {result.verdict}\n")


def coordinate_figure(result: CoordinateCheck, run_name: str = "") -> "Figure":
    """Plot the change of each layer over the width, after the first and after the last step.

    Args:
        result: result of the check.
        run_name: name of the run, shown below the title.
    """
    from matplotlib.lines import Line2D

    from foundry.tracking.plot_style import BLUE, GREEN, ORANGE, head, panels

    steps = sorted({1, result.num_steps})
    figure, axes_list = panels(len(steps))
    names = list(result.layers)
    colours = {names[0]: GREEN, **dict.fromkeys(names[1:-1], BLUE), names[-1]: ORANGE}
    drawn = [values[step] for layer in result.layers.values() for values in layer.changes for step in steps]
    exponents = [math.log10(value) for value in drawn if 0 < value < math.inf] or [0.0]
    limits = 10.0 ** math.floor(min(exponents)), 10.0 ** math.ceil(max(exponents) + 1e-3)
    for axes, step in zip(axes_list, steps, strict=True):
        _draw_step(axes, result, step, colours)
        axes.set_ylim(*limits)  # whole decades, so that each axis has labels
    labels = ((names[0], GREEN), (f"blocks 1 to {len(names) - 2}, darker with depth", BLUE), (names[-1], ORANGE))
    handles = [Line2D([], [], color=colour, marker="o", markersize=4, label=label) for label, colour in labels]
    title = f"Change of layer outputs by width, {result.parametrization}"
    head(figure, title, " · ".join(filter(None, (result.verdict, run_name))), handles=handles)
    return figure


def _draw_step(axes: "Axes", result: CoordinateCheck, step: int, colours: dict[str, str]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    num_blocks = len(result.layers) - 2
    for index, (name, layer) in enumerate(result.layers.items()):
        alpha = 0.3 + 0.7 * index / num_blocks if 0 < index <= num_blocks else 1.0
        changes = [values[step] or math.nan for values in layer.changes]
        axes.plot(result.widths, changes, color=colours[name], alpha=alpha, linewidth=1.6, marker="o", markersize=4)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_locator(FixedLocator(list(result.widths)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
    axes.set_title(f"after step {step}", fontsize=10, loc="left")
    axes.set_xlabel("model.hidden_size")
    axes.set_ylabel("mean absolute change since step 0")


def _run(config: Config, options: CoordinatesOptions, run_dir: Path) -> Outcome:
    return Outcome(check_coordinates(config, options, run_dir).numbers())


def main() -> None:
    """Entry point of the command."""
    run_composed(CoordinatesOptions, _run, name="foundry.coordinates", doc=__doc__.split(": ", 1)[1].rstrip())
