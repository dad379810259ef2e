"""`foundry lr_find [overrides]`: suggest a learning rate for a run, from a short training with increasing rates.

The rate grows from lr_find.min to lr_find.max by the same factor at each step, with the model, data, optimizer and
ranks of the run (the range test of Smith 2017, arXiv:1506.01186, with an exponential ramp). The suggestion is the rate
at which the loss falls fastest. Only a picture and the numbers are saved.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from foundry.commands.composed_command import run_composed
from foundry.config.command import Outcome, check_output, print_path
from foundry.config.environment import detect
from foundry.config.schemas.root import Config
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation, counted
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import STATUS
from foundry.run_dir.outputs import has_keys, is_picture
from foundry.run_dir.strict_json import encode

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PREFIX = "lr_find."
NUMBERS, PICTURE = "lr_find.json", "lr_find.png"
_FEWEST_STEPS = 10
_WINDOW = 0.1  # fraction of the ramp used to smooth and differentiate the loss
_CLEAR = 8.0  # minimum fall of the loss in standard errors: the extremes of many smoothed values always differ somewhat


@dataclass(frozen=True, kw_only=True)
class FindOptions:
    """Options of the learning-rate ramp."""

    min: float = setting(1e-7, "learning rate of the first step", gt=0)
    max: float = setting(1.0, "learning rate of the last step", gt=0)
    steps: int = setting(100, "optimizer steps of the ramp", ge=_FEWEST_STEPS, le=10**6)
    stop_at: float = setting(
        4.0, "end the ramp when the loss exceeds its minimum by this factor, since training has then diverged", gt=1
    )


@dataclass(frozen=True)
class RangeTest:
    """Result of a learning-rate range test.

    Attributes:
        rates: learning rates, ascending, evenly spaced in their logarithm.
        losses: loss at each rate, before the update; the last may be NaN or infinite.
    """

    rates: Sequence[float]
    losses: Sequence[float]

    @property
    def _lines(self) -> list[tuple[float, float]]:
        """Value and slope (per factor of e in the rate) at each rate of a straight line fitted to the losses nearby.

        This is the smoothing and differentiation of Savitzky and Golay (1964) with polynomials of degree 1.
        """
        width = min(len(self.rates), max(5, round(_WINDOW * len(self.rates))))
        lines = []
        for index in range(len(self.rates)):
            first = min(max(0, index - width // 2), len(self.rates) - width)
            window = range(first, first + width)
            xs, ys = [math.log(self.rates[k]) for k in window], [self.losses[k] for k in window]
            mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
            slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
            slope /= sum((x - mean_x) ** 2 for x in xs)
            lines.append((mean_y + slope * (math.log(self.rates[index]) - mean_x), slope))
        return lines

    @property
    def smoothed(self) -> list[float]:
        """Smoothed losses."""
        return [height for height, _ in self._lines]

    @property
    def suggestion(self) -> float | None:
        """Rate of the steepest descent before the minimum of the smoothed loss; None without a fall above its noise."""
        lines = [line for line in self._lines if math.isfinite(line[0])]
        if not lines:
            return None
        lowest = min(range(len(lines)), key=lambda index: lines[index][0])
        steepest = min(range(lowest + 1), key=lambda index: lines[index][1])
        fall = max(height for height, _ in lines[: lowest + 1]) - lines[lowest][0]
        return self.rates[steepest] if fall > _CLEAR * self._noise(lowest) else None

    def _noise(self, last: int) -> float:
        """Return the standard error of a smoothed loss, from the differences of neighboring losses up to `last`."""
        differences = [b - a for a, b in pairwise(self.losses[: last + 1]) if math.isfinite(a + b)]
        if not differences:
            return 0.0
        spread = math.sqrt(sum(difference * difference for difference in differences) / (2 * len(differences)))
        return spread / math.sqrt(max(1.0, _WINDOW * len(self.rates)))

    def numbers(self) -> dict[str, object]:
        """Return the content of lr_find.json."""
        return {"suggestion": self.suggestion, **asdict(self)}


def find(config: Config, options: FindOptions, run_dir: Path) -> RangeTest | None:
    """Train through the ramp, write the result into the run directory, and print the suggested rate.

    Args:
        config: configuration of the run; its learning rates, budget, checkpoints and evaluations are ignored.
        options: options of the ramp.
        run_dir: directory without a run.

    Returns:
        The result; None on ranks above 0.

    Raises:
        ConfigError: the run directory contains a run, the objective trains on completions, a part cannot be built, or
            the loss does not fall.
    """
    if options.min >= options.max:
        raise ConfigError(Violation(f"{_PREFIX}min", f"is {options.min:g} but must be below max={options.max:g}"))
    if (run_dir / STATUS).exists():
        raise ConfigError(Violation("hydra.run.dir", f"is {run_dir}, which holds a run; choose another"))
    for name, is_earlier in ((NUMBERS, has_keys("suggestion", "rates")), (PICTURE, is_picture)):
        check_output(name, run_dir / name, is_earlier=is_earlier)
    processes = detect().num_processes(config.distributed.nproc_per_node)
    if processes == 1:
        result = ramp(config, options, run_dir)
    else:
        from foundry.launch.local import run_local

        result = run_local(processes, ramp, config, options, run_dir)
    if detect().rank > 0:
        return None
    _report(result, options, run_dir)
    return result


def ramp(config: Config, options: FindOptions, run_dir: Path) -> RangeTest:
    """Train through the ramp as one rank of the run; all ranks call this and return the same result.

    Raises:
        ConfigError: the objective trains on completions, or a part cannot be built.
    """
    from foundry.engine.short_training import short_training

    rates, losses = list[float](), list[float]()
    reason = "trains on completions, whose loss does not rank learning rates; compare some: -m hparams.lr=..."
    with short_training(config, run_dir, generation=reason) as training:
        for step in range(1, options.steps + 1):
            rate = options.min * (options.max / options.min) ** ((step - 1) / (options.steps - 1))
            loss = training.take_step(training.next_window(), rate, step)
            if loss is None:
                break
            rates.append(rate)
            losses.append(loss)
            _show(training.world.is_main, step, options.steps, rate, loss)
            if not loss < (lowest := min(losses)) + (options.stop_at - 1) * abs(lowest):  # also true for NaN
                break
    return RangeTest(rates, losses)


def _show(is_main: bool, step: int, steps: int, rate: float, loss: float) -> None:
    """Print a line on rank 0 for each tenth of the ramp."""
    if is_main and (step == 1 or step % max(1, steps // 10) == 0):
        sys.stdout.write(f"step {step}/{steps}  lr {rate:.2e}  loss {loss:.4f}\n")
        sys.stdout.flush()


def _report(result: RangeTest, options: FindOptions, run_dir: Path) -> None:
    """Write plot and numbers, and print the suggested override.

    Raises:
        ConfigError: the ramp was too short, or the loss did not fall.
    """
    if len(result.rates) < _FEWEST_STEPS:
        message = f"is {options.min:g} but the loss has diverged after {counted(len(result.rates), 'step')}; lower it"
        raise ConfigError(Violation(f"{_PREFIX}min", message))
    from foundry.tracking.plot_style import save_figure

    write_atomically(run_dir / NUMBERS, encode(result.numbers()) + "\n")
    save_figure(range_figure(result, run_dir.name), run_dir / PICTURE)
    print_path(run_dir / PICTURE, "picture        ")
    if result.suggestion is None:
        message = f"is {options.max:g} but up to {result.rates[-1]:.2g} the loss does not fall by more than its noise"
        raise ConfigError(Violation(f"{_PREFIX}max", f"{message}; increase lr_find.steps or lr_find.max"))
    sys.stdout.write(f"steepest fall  hparams.lr={result.suggestion:.1e}\n")


def range_figure(result: RangeTest, run_name: str = "") -> "Figure":
    """Plot the loss over the learning rate, with the suggestion.

    Args:
        result: result of the ramp.
        run_name: text below the title.
    """
    from foundry.tracking.plot_style import BLUE, GREY, ORANGE, fit, frame, legend_above

    figure, axes = frame("Learning-rate range test", "learning rate (grows each step)", "loss", below=run_name)
    axes.set_xscale("log")
    axes.plot(result.rates, result.losses, color=BLUE, alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(result.rates, result.smoothed, color=BLUE, linewidth=1.8, label="smoothed")
    if result.suggestion is not None:
        index = result.rates.index(result.suggestion)
        label = f"steepest fall: {result.suggestion:.1e}"
        axes.axvline(result.suggestion, color=GREY, linestyle=":", linewidth=1.2)
        axes.plot([result.suggestion], [result.smoothed[index]], "o", color=ORANGE, markersize=7, label=label)
    fit(axes, result.losses)
    legend_above(axes)
    return figure


def _find(config: Config, options: FindOptions, run_dir: Path) -> Outcome | None:
    result = find(config, options, run_dir)
    return None if result is None else Outcome(result.numbers())


def main() -> None:
    """Entry point of the command."""
    run_composed(FindOptions, _find, name="foundry.lr_find", doc=__doc__.split(": ", 1)[1].rstrip())
