"""`foundry scaling dir=DIR`: fit a scaling law to the jobs of a sweep, and predict the loss of larger runs.

The law is L(N, D) = E + A/N^alpha + B/D^beta, with N parameters and D trained tokens. predict='N=30M D=600M' adds a
prediction. predict, budgets, exclude and hold_out accept a value or a list, and can be repeated.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.console import Console

from foundry.config.command import Outcome, help_text, parse_options, quoted, run_words, runs_option
from foundry.config.record.frozen import read_recorded
from foundry.config.setting import setting
from foundry.config.sources import is_url
from foundry.core.batch_sizes import parse_count
from foundry.core.errors import ConfigError, Violation, as_text
from foundry.run_dir.files import UnsafeFileError, write_atomically
from foundry.run_dir.outputs import has_keys, is_picture, refusal
from foundry.run_dir.redact import one_line
from foundry.run_dir.strict_json import encode
from foundry.sweeps.reading import read_sweep
from foundry.sweeps.scaling.analysis import Analysis, analyze
from foundry.sweeps.scaling.runs import Parameters, select_runs

JSON, PICTURE = "scaling.json", "scaling.png"
"""Names of the files that the command writes into the directory of the sweep."""

_LISTS = ("predict", "budgets", "exclude", "hold_out")
"""Options that take one value or a list, and can be repeated."""


@dataclass(frozen=True, kw_only=True)
class ScalingOptions:
    """Options of the command."""

    dir: str = setting("???", "directory of a sweep, a directory with run directories, or the URL of their mirrors")
    predict: list[str] = setting(list, "sizes whose loss to predict, such as 'N=30M D=600M'")
    budgets: list[float] = setting(
        list, "compute budgets in FLOPs, C = 6 N D; the result has the N and D with the lowest loss for each budget"
    )
    exclude: list[str] = setting(
        list, "jobs to leave out: number, directory or override, such as 'model.hidden_size=64'; * is a wildcard"
    )
    hold_out: list[str] = setting(
        list, "jobs that are not fitted but predicted, to measure the error; selected as in exclude"
    )
    parameters: Parameters = setting(
        Parameters.non_embedding, "parameters that count as N: non_embedding (without embeddings and head) or total"
    )
    metric: str = setting("val_loss", "held-out loss in result.json")
    confidence: float = setting(0.95, "confidence of the intervals", gt=0, lt=1)
    resamples: int = setting(300, "number of resampled fits for the intervals", ge=20, le=100_000)
    seed: int = setting(0, "seed of the resampling", ge=0, le=2**63 - 1)
    picture: bool = setting(True, f"draw {PICTURE}")
    trust: bool = setting(False, "run the code of models in config.yaml that are not part of foundry, to count N")


def fit_scaling_law(options: ScalingOptions) -> Outcome:
    """Fit and print the law of a sweep, and write its files, except for a URL.

    Raises:
        ConfigError: an option is invalid, the jobs cannot be compared or do not determine the law, or a file with the
            name of an output is not an earlier output.
    """
    console, folder = Console(), runs_option("dir", options.dir)
    sizes = [_parse_size(text) for text in options.predict]
    for budget in options.budgets:
        if budget <= 0:
            raise ConfigError(Violation("budgets", f"is {as_text(budget)} but must be above 0; write budgets=[1e18]"))
    names = [JSON, *([PICTURE] if options.picture else [])]
    if not is_url(options.dir):
        _check_outputs(folder, names)
    sweep = read_sweep(folder)
    selection = select_runs(
        sweep,
        parameter_counter(trust=options.trust),
        metric=options.metric,
        parameters=options.parameters,
        exclude=options.exclude,
        hold_out=options.hold_out,
    )
    analysis = analyze(
        selection,
        folder=folder,
        names=list(sweep.names),
        metric=options.metric,
        counted_as=options.parameters,
        sizes=sizes,
        budgets=options.budgets,
        confidence=options.confidence,
        resamples=options.resamples,
        seed=options.seed,
    )
    _print(console, analysis)
    if not is_url(options.dir):
        try:
            _write(analysis, names)
        except OSError as error:  # for example the directory of another user
            _say(console, f"no files written: {error}")
        else:
            _say(console, f"in {folder}: {', '.join(names)}")
    return Outcome(analysis.facts())


def parameter_counter(*, trust: bool) -> Callable[[Path], tuple[int, int]]:
    """Return a function that counts the parameters of a run, from a model without storage.

    It returns the number of parameters without embeddings and head, and of all. Runs with equal model settings are
    counted once.

    Args:
        trust: also build custom models, which runs their code.
    """
    counts: dict[str, tuple[int, int]] = {}

    def count(run_dir: Path) -> tuple[int, int]:
        from foundry.engine.restore import build_unfilled
        from foundry.planning.parameter_counts import count_parameters

        key = repr((read_recorded(run_dir) or {}).get("model"))
        if key not in counts:
            counts[key] = count_parameters(build_unfilled(run_dir, trust=trust))
        return counts[key]

    return count


def join_lists(words: Sequence[str]) -> list[str]:
    """Return arguments that contain each list option once, as a list. A value that is not a list is one item.

    Args:
        words: `key=value` arguments, such as `predict=N=30M D=600M`.
    """
    joined, values = list[str](), dict[str, list[str]]()
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or key not in _LISTS or (items := _parse_items(word, text)) is None:
            joined.append(word)
        else:
            values.setdefault(key, []).extend(items)
    return [*joined, *(f"{key}=[{','.join(map(quoted, items))}]" for key, items in values.items())]


def _parse_items(word: str, text: str) -> list[str] | None:
    """Return the items of a list option; None if `parse_options` must report an error in it."""
    if not text.startswith(("[", "'", '"')):
        return [text]
    try:
        value: Any = OverridesParser.create().parse_overrides([word])[0].value()
    except HydraException:
        return None
    return [str(item) for item in value] if isinstance(value, list) else [str(value)]


def _parse_size(text: str) -> dict[str, float]:
    """Parse `N=30M D=600M` to numbers by name; one of both may be missing.

    Raises:
        ConfigError: the text has another form.
    """
    size = dict[str, float]()
    for part in text.replace(",", " ").split():
        name, equals, value = part.partition("=")
        if not equals or name not in ("N", "D") or name in size:
            raise ConfigError(Violation("predict", f"is {as_text(text)}; write predict='N=30M D=600M'"))
        try:
            size[name] = parse_count(value)
        except ValueError as error:
            raise ConfigError(Violation("predict", f"is {as_text(text)}: {name}={error}")) from None
        if size[name] < 1:
            raise ConfigError(Violation("predict", f"is {as_text(text)} but {name} must be at least 1"))
    if not size:
        raise ConfigError(Violation("predict", "is empty; write predict='N=30M D=600M'"))
    return size


def _check_outputs(folder: Path, names: Sequence[str]) -> None:
    """Refuse to replace files that are not earlier outputs.

    Raises:
        ConfigError: a file with the name of an output exists and is not an earlier output.
    """
    recognizers = {JSON: has_keys("law", "runs", "excluded"), PICTURE: is_picture}
    if folders := [path for name in names if (path := folder / name).is_dir()]:
        raise UnsafeFileError(folders[0], "a folder")
    reasons = [(name, refusal(folder / name, is_earlier=recognizers[name])) for name in names]
    if violations := [Violation(name, reason) for name, reason in reasons if reason is not None]:
        raise ConfigError(violations)


def _print(console: Console, analysis: Analysis) -> None:
    from foundry.sweeps.scaling.text import analysis_lines

    for line in analysis_lines(analysis):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _write(analysis: Analysis, names: Sequence[str]) -> None:
    write_atomically(analysis.folder / JSON, encode(analysis.facts()) + "\n")
    if PICTURE in names:
        from foundry.sweeps.scaling.figure import scaling_figure
        from foundry.tracking.plot_style import save_figure

        save_figure(scaling_figure(analysis), analysis.folder / PICTURE)


def _say(console: Console, line: str) -> None:
    console.print(one_line(line), soft_wrap=True, markup=False, highlight=False)


def main() -> None:
    """Entry point of the command."""
    doc, name = __doc__.split(": ", 1)[1].strip(), "foundry.scaling"
    run_words(
        lambda words: fit_scaling_law(parse_options(ScalingOptions, join_lists(words))),
        name=name,
        write_help=lambda: help_text(ScalingOptions, name, doc),
    )
