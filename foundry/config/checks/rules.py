"""Rules across groups of the configuration. A rule is a function that yields violations."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from itertools import takewhile
from math import ceil
from pathlib import Path
from typing import Any

from foundry.config.checks.targets import check_targets
from foundry.config.composition.store import group_schemas
from foundry.config.environment import Launch
from foundry.config.lengths import check_lengths, resolve_budget, unrounded_batch_sizes
from foundry.config.metrics import check_metrics, computed_metrics
from foundry.config.schemas.distributed import resolve_distributed
from foundry.config.schemas.hparams import HParams, ScheduleUnit
from foundry.config.schemas.root import Config
from foundry.config.sources import download_hint, hub_hint, is_url, listed_paths, why_no_url
from foundry.core.batch_sizes import BatchSizes
from foundry.core.duration import Duration, Unit
from foundry.core.errors import ConfigError, Violation, as_text, listed
from foundry.core.tasks import checks

_MOST_SIZES = 8
"""Maximum number of batch sizes listed in a message."""
_ENOUGH = (("vocab_size", "vocab_size"), ("max_seq_len", "seq_len"), ("num_classes", "num_classes"))
"""Pairs of a model size and a data size; the model size must be at least the data size."""


Rule = Callable[[Config, Launch], Iterator[Violation]]


def _budget(config: Config, launch: Launch) -> Iterator[Violation]:
    hparams = config.hparams
    if hparams.epochs is None and hparams.max_steps is None and hparams.train_samples is None:
        yield Violation("hparams.max_steps", "no budget; set at least one of max_steps, train_samples and epochs")


def _batch(config: Config, launch: Launch) -> Iterator[Violation]:
    """Check that batch sizes end at `global_batch_size` and are multiples of one microbatch per rank."""
    hparams, tokens = config.hparams, _tokens_per_sample(config)
    if schedule_violations := list(_batch_schedule(config)):
        yield from schedule_violations
        return
    total, size_key = hparams.global_batch_size, _batch_size_key(hparams)
    try:
        sizes = unrounded_batch_sizes(hparams, tokens_per_sample=tokens)
    except ValueError as error:
        yield Violation(size_key, f"{error}; it must end at hparams.global_batch_size={total}")
        return
    if sizes.final != total:
        message = f"is {total} but the last size of hparams.batch_schedule is {sizes.final}; set both to the same value"
        yield Violation("hparams.global_batch_size", message)
    else:
        yield from _division(hparams, sizes, launch.dp_size)


def _batch_schedule(config: Config) -> Iterator[Violation]:
    hparams = config.hparams
    if hparams.batch_schedule is None:
        return
    if hparams.batch_ramp.start is not None:
        yield Violation("hparams.batch_schedule", "is set together with hparams.batch_ramp; choose one of them")
    if hparams.batch_schedule_unit is ScheduleUnit.tokens and _has_no_tokens(config.data):
        yield Violation(
            "hparams.batch_schedule_unit", "is tokens but samples of this data have no tokens; set it to samples"
        )


def _division(hparams: HParams, sizes: BatchSizes, ranks: int) -> Iterator[Violation]:
    """Check that each batch size is a multiple of one microbatch per rank, or can be rounded down to a multiple."""
    total = hparams.global_batch_size
    per_gpu = hparams.per_gpu_batch_size
    key = _batch_size_key(hparams)
    step = per_gpu * ranks
    product = f"per_gpu_batch_size {per_gpu} x {ranks} {'rank' if ranks == 1 else 'ranks'} = {step}"
    invalid_sizes = [size for size in sizes.sizes if (size < step if hparams.allow_rounding else size % step)]
    if not invalid_sizes:
        return
    if hparams.allow_rounding:
        yield Violation(
            key, f"has {listed(invalid_sizes, _MOST_SIZES)}, below {product}, and would be rounded down to 0"
        )
    elif len(sizes.sizes) > 1:
        remedy = "change them, or set hparams.allow_rounding=true to round each down"
        yield Violation(
            key, f"has stages that are not multiples of {product}: {listed(invalid_sizes, _MOST_SIZES)}; {remedy}"
        )
    else:
        nearest_multiples = sorted({max(step, total // step * step), ceil(total / step) * step})
        nearest_sizes = " or ".join(map(str, nearest_multiples))
        yield Violation(key, f"is {total} but must be a multiple of {product}; nearest: {nearest_sizes}")


def _batch_size_key(hparams: HParams) -> str:
    """Return the key of the setting that determines the batch sizes."""
    if hparams.batch_schedule is not None:
        return "hparams.batch_schedule"
    return "hparams.global_batch_size" if hparams.batch_ramp.start is None else "hparams.batch_ramp"


def _tokens_per_sample(config: Config) -> int | None:
    """Return the number of tokens per sample if the schema of the data determines this number, otherwise None."""
    length = getattr(config.data, "seq_len", None)
    return length if isinstance(length, int) and not getattr(config.data, "is_ragged", False) else None


def _offers(data: Any) -> frozenset[str] | None:
    """Return the contents of a sample that the data's schema declares, or None if it declares no contents."""
    return getattr(data, "offers", None)


def _has_no_tokens(data: Any) -> bool:
    offers = _offers(data)
    return offers is not None and "tokens" not in offers


def _lengths(config: Config, launch: Launch) -> Iterator[Violation]:
    """Check the durations of schedule, evaluations and checkpoints if the run's length is known without the data.

    Otherwise, the run checks the durations before its first step.
    """
    hparams, tokens = config.hparams, _tokens_per_sample(config)
    limits = [length for length in (hparams.max_steps, hparams.train_samples) if length is not None]
    if hparams.epochs is not None or not limits or min(limits) < 1:
        return
    if hparams.batch_schedule is not None and tokens is None and not _has_no_tokens(config.data):
        return  # thresholds of the batch schedule may be in tokens
    names = ("warmup", "horizon", "decay", "weight_decay_horizon")
    texts = [getattr(config.scheduler, name, None) for name in names]
    units = {_unit(str(text)) for text in texts if text is not None}
    if (unit := config.evaluation.interval_unit()) is not None:
        units.add(unit)
    unknown = {None, Unit.epochs} | ({Unit.tokens} if tokens is None and not _has_no_tokens(config.data) else set())
    if units & unknown:
        return
    try:
        budget = resolve_budget(hparams, samples_per_epoch=1, dp_size=launch.dp_size, tokens_per_sample=tokens)
        yield from check_lengths(config, budget)
    except ValueError:
        return  # `_batch` reports the error
    except ConfigError as error:
        yield from error.violations


def _unit(text: str) -> Unit | None:
    try:
        return Duration.parse(text).unit
    except ValueError:
        return None


def _loss(config: Config, launch: Launch) -> Iterator[Violation]:
    loss = config.hparams.loss_function
    loss_functions = getattr(config.objective, "loss_functions", None)
    if loss_functions is not None and loss not in loss_functions:
        yield Violation("hparams.loss_function", _loss_message(loss, type(config.objective).__name__, loss_functions))
        return
    has_z_loss = loss_functions is None or hasattr(config.objective, "z_loss_coefficient")
    if config.hparams.z_loss_coefficient > 0 and not has_z_loss:
        name = type(config.objective).__name__
        yield Violation("hparams.z_loss_coefficient", f"is set but objective {name} has no z-loss; set it to 0")


def _loss_message(loss: str, objective: str, loss_functions: Sequence[str]) -> str:
    """Return a message that the objective determines the loss function, with the objectives that use `loss`."""
    # Instances without values have class defaults, which the property `loss_functions` of some schemas reads.
    schemas = {name: object.__new__(schema) for name, schema in group_schemas("objective").items()}
    names = [name for name, schema in schemas.items() if loss in getattr(schema, "loss_functions", ())]
    options = "|".join(re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower() for name in names)
    remedy = f"choose objective={options}, or " if options else ""
    message = (
        f"is {loss}, which does not choose the loss: objective {objective} minimizes {' or '.join(loss_functions)}"
    )
    return f"{message}; {remedy}set hparams.loss_function={loss_functions[0]}"


def _metrics(config: Config, launch: Launch) -> Iterator[Violation]:
    computed = computed_metrics(config)
    if computed is not None:
        yield from check_metrics(config.evaluation, config.checkpoint.keep_best, computed)


def _samples(config: Config, launch: Launch) -> Iterator[Violation]:
    """Check that samples have the contents that model and objective require, if the schemas declare them."""
    offers = _offers(config.data)
    for group in ("model", "objective"):
        part = getattr(config, group)
        wants: frozenset[str] = getattr(part, "wants", frozenset())
        if offers is not None and not wants <= offers:
            needs, content = " and ".join(sorted(wants)), " and ".join(sorted(offers))
            name, data = getattr(part, "described", type(part).__name__), type(config.data).__name__
            yield Violation(
                group,
                f"is {name}, which needs {needs}, but data is {data}, which has {content}; change one of them",
            )


def _sizes(config: Config, launch: Launch) -> Iterator[Violation]:
    """Check that sizes of model and objective equal the data's; model sizes in `_ENOUGH` may also be larger."""
    for group, pairs, is_wrong, relation in (
        ("model", _same_as_data(config.model), int.__ne__, "must be"),
        ("model", _ENOUGH, int.__lt__, "must be at least"),
        ("objective", _same_as_data(config.objective), int.__ne__, "must be"),
    ):
        for name, data_name in pairs:
            part_size, data_size = (
                getattr(getattr(config, group), name, None),
                getattr(config.data, data_name, None),
            )
            if isinstance(part_size, int) and isinstance(data_size, int) and is_wrong(part_size, data_size):
                message = f"is {part_size} but {relation} data.{data_name}={data_size}; leave it out to follow the data"
                yield Violation(f"{group}.{name}", message)


def _same_as_data(part: Any) -> list[tuple[str, str]]:
    return [(name, name) for name in getattr(part, "same_as_data", ())]


def _accumulation(config: Config, launch: Launch) -> Iterator[Violation]:
    expected = config.hparams.global_batch_size // max(1, config.hparams.per_gpu_batch_size * launch.dp_size)
    if config.hparams.accum_freq != expected:
        yield Violation("hparams.accum_freq", f"is computed from the batch sizes ({expected}); do not set it")


def _launcher(config: Config, launch: Launch) -> Iterator[Violation]:
    environment, distributed = launch.environment, config.distributed
    local = environment.local_world_size
    if environment.starts_one_per_node and distributed.nproc_per_node not in (1, local):
        message = f"is {distributed.nproc_per_node} but the variables of {environment.launcher} say {local}"
        yield Violation("distributed.nproc_per_node", f"{message} on this node; leave it out")
    elif environment.launcher != "single" and distributed.nproc_per_node not in (1, local):
        yield Violation(
            "distributed.nproc_per_node",
            f"is {distributed.nproc_per_node} but {environment.launcher} started {local} on this node; leave it out",
        )


def _restarts(config: Config, launch: Launch) -> Iterator[Violation]:
    key, restarts, launcher = (
        "distributed.max_restarts",
        config.distributed.max_restarts,
        launch.environment.launcher,
    )
    if not restarts:
        return
    if launcher == "torchrun":
        yield Violation(
            key, f"is {restarts} but torchrun starts the processes; start it with --max-restarts={restarts}"
        )
    elif launcher in ("slurm", "submitit") or launch.tasks > 1:
        message = "but Slurm or submitit starts the processes; let Slurm requeue the job (docs/slurm.md)"
        yield Violation(key, f"is {restarts} {message}")
    elif launcher in ("mpi", "pytorchjob") or launch.environment.num_nodes > 1:
        message = f"but the ranks of {launcher} are not on this node alone; let {launcher} start all of them again"
        yield Violation(key, f"is {restarts} {message}")
    elif launch.environment.num_processes(config.distributed.nproc_per_node) == 1:
        yield Violation(
            key,
            f"is {restarts} but foundry starts no processes; set distributed.nproc_per_node, or set this key to 0",
        )
    if config.checkpoint.interval is None and config.checkpoint.every_minutes is None:
        message = (
            f"is {restarts} but the run saves no checkpoints to restart from; set checkpoint.interval or .every_minutes"
        )
        yield Violation(key, message)
    if config.checkpoint.resume == "never":
        yield Violation(key, f"is {restarts} but checkpoint.resume=never prevents restarts; set checkpoint.resume=auto")


def _strategy(config: Config, launch: Launch) -> Iterator[Violation]:
    try:
        resolve_distributed(config.distributed, launch.world_size)
    except ConfigError as error:
        yield from error.violations


def _paths(config: Config, launch: Launch) -> Iterator[Violation]:
    """Check that all input files exist, so that a missing file is reported before the job waits in a queue."""
    for group in fields(config):
        yield from _missing_paths(getattr(config, group.name), group.name)


def _missing_paths(node: Any, key: str) -> Iterator[Violation]:
    for item in fields(node) if is_dataclass(node) else ():
        value = getattr(node, item.name)
        if is_dataclass(value):
            yield from _missing_paths(value, f"{key}.{item.name}")
        elif item.metadata.get("path"):
            verb, reads_urls = "has" if isinstance(value, list) else "is", item.name in getattr(node, "urls", ())
            for path in listed_paths(value):
                problem = None
                if reads_urls and is_url(path):
                    if reason := why_no_url(path):
                        problem = f" but {reason}"
                elif not _exists(path):
                    hint = hub_hint(path) if reads_urls else download_hint(path)
                    problem = f", which does not exist{hint or '; give an existing file or folder'}"
                if problem:
                    yield Violation(f"{key}.{item.name}", f"{verb} {as_text(path)}{problem}")


def _exists(path: str) -> bool:
    parts = Path(path).parts
    literal_prefix = Path(*takewhile(lambda part: not set(part) & set("*?["), parts))
    try:
        if len(literal_prefix.parts) == len(parts):
            return literal_prefix.is_file() or literal_prefix.is_dir()
        if "**" in parts:  # a recursive glob can take minutes
            return literal_prefix.is_dir()
        return any(True for _ in literal_prefix.glob(str(Path(path).relative_to(literal_prefix))))
    except (OSError, ValueError):  # invalid path, or no permission
        return False


def _as_rule(check: Callable[[Config], Iterator[Violation]], config: Config, launch: Launch) -> Iterator[Violation]:
    """Adapt a check of the configuration to the signature of a rule."""
    yield from check(config)


RULES: tuple[Rule, ...] = (
    _budget,
    _batch,
    _accumulation,
    _lengths,
    _samples,
    _sizes,
    partial(_as_rule, check_targets),
    _loss,
    _metrics,
    _launcher,
    _restarts,
    _strategy,
    _paths,
)


def rules(config: Config) -> Iterator[Rule]:
    """Yield the cross-group rules, the `check_with` method of each part, and the checks of installed tasks."""
    yield from RULES
    parts: list[Any] = [getattr(config, item.name) for item in fields(config)]
    yield from (part.check_with for part in parts if hasattr(part, "check_with"))
    yield from (partial(_as_rule, check) for check in checks())
