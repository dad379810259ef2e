"""What a composed configuration must satisfy beyond its types. A rule yields a violation for each thing wrong."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from foundry.config.batch_sizes import BatchSizes
from foundry.config.distributed import DDP, FSDP, HSDP, GradientSync, Strategy
from foundry.config.duration import Duration, Unit
from foundry.config.environment import LaunchEnvironment, detect
from foundry.config.errors import ConfigError, Violation, nearest
from foundry.config.guard import SpikeAction
from foundry.config.hparams import HParams, ScheduleUnit
from foundry.config.launcher import check_launcher, tasks_of
from foundry.config.lengths import batch_sizes_of, budget_of, check_lengths
from foundry.config.metrics import check_metrics, check_sweeper, declared
from foundry.config.precision import PrecisionMode
from foundry.config.root import Config, to_config
from foundry.config.scheduler import Scheduler
from foundry.config.secrets import check_secrets
from foundry.config.setting import check_fields
from foundry.config.store import GROUPS


@dataclass(frozen=True)
class Launch:
    """How the run will be started, as far as composition can know.

    Attributes:
        environment: what torchrun or Slurm say, if one of them started this process.
        world_size: ranks of the run.
    """

    environment: LaunchEnvironment
    world_size: int


Rule = Callable[[Config, Launch], Iterator[Violation]]


def check(composed: DictConfig) -> list[Violation]:
    """Every violation of a composed configuration, in a fixed order."""
    holes = [violation for key in _own_keys(composed) for violation in _holes(composed, key, key)]
    choices = OmegaConf.select(composed, "hydra.runtime.choices") or {}
    doubled = [
        Violation(group, "takes one option; to sweep over several add -m and leave out the brackets")
        for group in GROUPS
        # Hydra merges a list of options and notes no choice.
        if choices and group not in choices and group not in {hole.key for hole in holes}
    ]
    if holes or doubled:
        return holes + doubled
    config = to_config(composed)
    try:
        environment = detect()
    except ConfigError as error:
        return list(error.violations)
    launch = Launch(environment, _world_size(config, environment, composed))
    parts = [*_check_groups(config), *check_launcher(composed), *check_sweeper(composed, config)]
    single = [*check_secrets(composed), *parts]
    wrong = {violation.key for violation in single}
    across = [violation for rule in RULES for violation in rule(config, launch)]
    # A rule that looked at a value already known to be wrong has nothing to add.
    return single + [v for v in across if not any(key in str(v) or key.startswith(v.key) for key in wrong)]


def _own_keys(composed: DictConfig) -> list[str]:
    return [str(key) for key in composed if key != "hydra"]


def _holes(parent: DictConfig, key: str, path: str) -> Iterator[Violation]:
    """Values at and below `key` that are missing, lead nowhere, or belong to no schema."""
    schema = OmegaConf.get_type(parent)
    known = {item.name for item in fields(schema)} if is_dataclass(schema) else None
    if known is not None and key not in known:
        yield Violation(path, f"is no key of the configuration{nearest(key, known)}")
    elif OmegaConf.is_missing(parent, key):
        doc = schema.__dataclass_fields__[key].metadata.get("doc", "") if is_dataclass(schema) else ""
        yield Violation(path, f"has no value{f' ({doc})' if doc else ''}; give it as {path}=...")
    elif OmegaConf.is_interpolation(parent, key):
        try:
            parent[key]
        except OmegaConfBaseException:
            raw, group = OmegaConf.to_container(parent, resolve=False), path.partition(".")[0]
            source = str(cast(dict[str, Any], raw)[key]).strip("${}")
            yield Violation(
                path, f"is taken from {source}, which has no value here; set {path}=... or choose another {group}"
            )
    elif isinstance(child := parent[key], DictConfig):
        for name in [str(name) for name in child]:
            yield from _holes(child, name, f"{path}.{name}")


def _world_size(config: Config, environment: LaunchEnvironment, composed: DictConfig) -> int:
    if environment.launcher != "single":
        return environment.world_size
    tasks = tasks_of(composed)
    return tasks if tasks > 1 else config.distributed.nproc_per_node


def _check_groups(config: Config) -> Iterator[Violation]:
    """Bounds of fields, and what a part's own schema has to say."""
    for group in fields(config):
        node = getattr(config, group.name)
        if is_dataclass(node):
            yield from check_fields(node, group.name)
            yield from node.check() if hasattr(node, "check") else ()
        elif not isinstance(node, dict) or "_target_" not in node:
            yield Violation(group.name, "must be a mapping with a _target_: choose an option of the group")


def _budget(config: Config, launch: Launch) -> Iterator[Violation]:
    hparams = config.hparams
    if hparams.epochs is None and hparams.max_steps is None and hparams.train_samples is None:
        yield Violation("hparams.max_steps", "no budget: give at least one of max_steps, train_samples and epochs")


def _batch(config: Config, launch: Launch) -> Iterator[Violation]:
    """Batch sizes are consistent with each other, and divide over ranks and microbatches."""
    hparams, tokens = config.hparams, _tokens_per_sample(config)
    if hparams.per_gpu_batch_size < 1:
        return
    if wrong := list(_batch_schedule(config)):
        yield from wrong
        return
    total, staged = hparams.global_batch_size, _staged(hparams)
    try:
        sizes = batch_sizes_of(replace(hparams, allow_rounding=False), world_size=1, tokens_per_sample=tokens)
    except ValueError as error:
        yield Violation(staged, f"{error}; it must end at hparams.global_batch_size={total}")
        return
    if sizes.final != total:
        message = f"is {total} but the last size of hparams.batch_schedule is {sizes.final}; give both the same"
        yield Violation("hparams.global_batch_size", message)
    else:
        yield from _division(hparams, sizes, launch.world_size)


def _batch_schedule(config: Config) -> Iterator[Violation]:
    hparams = config.hparams
    if hparams.batch_schedule is None:
        return
    if hparams.batch_ramp.start is not None:
        yield Violation("hparams.batch_schedule", "is given beside hparams.batch_ramp; choose one of them")
    if hparams.batch_schedule_unit is ScheduleUnit.tokens and _kind(config.data) == "images":
        yield Violation("hparams.batch_schedule_unit", "is tokens but a sample of this data has none; set samples")


def _division(hparams: HParams, sizes: BatchSizes, ranks: int) -> Iterator[Violation]:
    """Every size is a multiple of what one microbatch on every rank takes, or may be rounded down to one."""
    total, per_gpu, key = hparams.global_batch_size, hparams.per_gpu_batch_size, _staged(hparams)
    step = per_gpu * ranks
    product = f"per_gpu_batch_size {per_gpu} x {ranks} {'rank' if ranks == 1 else 'ranks'} = {step}"
    wrong = [size for size in sizes.sizes if (size < step if hparams.allow_rounding else size % step)]
    if not wrong:
        return
    if hparams.allow_rounding:
        yield Violation(key, f"has {_listed(wrong)}, below {product}, which rounds down to nothing")
    elif len(sizes.sizes) > 1:
        remedy = "change them, or set hparams.allow_rounding=true to round each down"
        yield Violation(key, f"has stages that are not multiples of {product}: {_listed(wrong)}; {remedy}")
    else:
        near = sorted({max(step, total // step * step), ceil(total / step) * step})
        nearest_sizes = " or ".join(map(str, near))
        yield Violation(key, f"is {total} but must be a multiple of {product}; nearest: {nearest_sizes}")


def _staged(hparams: HParams) -> str:
    """The key that gives the batch sizes."""
    if hparams.batch_schedule is not None:
        return "hparams.batch_schedule"
    return "hparams.global_batch_size" if hparams.batch_ramp.start is None else "hparams.batch_ramp"


def _listed(sizes: list[int], most: int = 8) -> str:
    more = f" and {len(sizes) - most} more" if len(sizes) > most else ""
    return ", ".join(map(str, sizes[:most])) + more


def _tokens_per_sample(config: Config) -> int | None:
    """What the data's schema says of it, before the data is read."""
    length = getattr(config.data, "seq_len", None)
    return length if isinstance(length, int) else None


def _kind(part: Any) -> str | None:
    return getattr(part, "kind", None)


def _learning_rates(config: Config, launch: Launch) -> Iterator[Violation]:
    scheduler, lr = config.scheduler, config.hparams.lr
    if not isinstance(scheduler, Scheduler):
        return
    for name in ("min_lr", "force_min_lr", "warmup_init"):
        if getattr(scheduler, name) > lr:
            yield Violation(f"scheduler.{name}", f"is {getattr(scheduler, name):g} but hparams.lr is only {lr:g}")


def _lengths(config: Config, launch: Launch) -> Iterator[Violation]:
    """Where the length of the run is known without the data; otherwise the run itself checks before its first step."""
    hparams, tokens = config.hparams, _tokens_per_sample(config)
    given = [length for length in (hparams.max_steps, hparams.train_samples) if length is not None]
    if hparams.epochs is not None or not given or min(given) < 1:
        return
    if hparams.batch_schedule is not None and tokens is None and _kind(config.data) != "images":
        return  # its thresholds may count tokens
    names = ("warmup", "horizon", "decay", "weight_decay_horizon")
    texts = [getattr(config.scheduler, name, None) for name in names]
    units = {_unit(str(text)) for text in texts if text is not None}
    if config.evaluation.interval is not None:
        units.add(config.evaluation.interval_unit())
    unknown = {None, Unit.epochs} | ({Unit.tokens} if tokens is None and _kind(config.data) is None else set())
    if units & unknown:
        return
    try:
        budget = budget_of(hparams, samples_per_epoch=1, world_size=launch.world_size, tokens_per_sample=tokens)
        yield from check_lengths(config, budget)
    except ValueError:
        return  # said of the batch sizes already
    except ConfigError as error:
        yield from error.violations


def _unit(text: str) -> Unit | None:
    try:
        return Duration.parse(text).unit
    except ValueError:
        return None


def _loss(config: Config, launch: Launch) -> Iterator[Violation]:
    loss, fitting = config.hparams.loss_function, getattr(config.objective, "loss_functions", None)
    if fitting is not None and loss not in fitting:
        name = type(config.objective).__name__
        yield Violation(
            "hparams.loss_function",
            f"is {loss} but objective {name} minimises {' or '.join(fitting)}; choose the other objective or loss",
        )
    elif loss == "mse" and config.hparams.z_loss_coefficient > 0:
        yield Violation("hparams.z_loss_coefficient", "is set but mse has no logits to regularise; set it to 0")


def _metrics(config: Config, launch: Launch) -> Iterator[Violation]:
    measured = declared(config.objective)
    if measured is not None:
        yield from check_metrics(config, measured)


def _kinds(config: Config, launch: Launch) -> Iterator[Violation]:
    """Model, data and objective speak of the same things, as far as their schemas say of what."""
    data = getattr(config.data, "kind", None)
    for group in ("model", "objective"):
        part = getattr(config, group)
        kind = getattr(part, "kind", data)
        if data is not None and kind != data:
            yield Violation(
                group, f"is {type(part).__name__}, made for {kind}, but data is {type(config.data).__name__}: {data}"
            )


def _accumulation(config: Config, launch: Launch) -> Iterator[Violation]:
    expected = config.hparams.global_batch_size // max(1, config.hparams.per_gpu_batch_size * launch.world_size)
    if config.hparams.accum_freq != expected:
        yield Violation("hparams.accum_freq", f"is computed from the batch sizes ({expected}); do not set it")


def _launcher(config: Config, launch: Launch) -> Iterator[Violation]:
    environment, distributed = launch.environment, config.distributed
    started = environment.local_world_size
    if environment.launcher != "single" and distributed.nproc_per_node not in (1, started):
        yield Violation(
            "distributed.nproc_per_node",
            f"is {distributed.nproc_per_node} but {environment.launcher} started {started} on this node; leave it out",
        )
    if distributed.strategy is Strategy.none and launch.world_size > 1:
        yield Violation(
            "distributed", f"is none but {launch.world_size} processes are to train together; choose ddp, fsdp or hsdp"
        )


def _strategy(config: Config, launch: Launch) -> Iterator[Violation]:
    distributed = config.distributed
    if isinstance(distributed, HSDP) and launch.world_size % distributed.num_replicas != 0:
        yield Violation(
            "distributed.num_replicas", f"is {distributed.num_replicas} but must divide the {launch.world_size} ranks"
        )
    keeps = distributed.gradient_sync is GradientSync.last_keep_params
    if isinstance(distributed, DDP) and keeps and not distributed.shard_optimizer:
        yield Violation(
            "distributed.gradient_sync",
            "is last_keep_params but ddp never frees its parameters; choose last, or distributed=fsdp",
        )


def _precision(config: Config, launch: Launch) -> Iterator[Violation]:
    mode, distributed = config.precision.mode, config.distributed
    if mode is PrecisionMode.amp_float16 and isinstance(distributed, FSDP) and distributed.cpu_offload:
        yield Violation(
            "precision",
            "is amp_float16 but its loss scaling needs gradients on the GPU: set distributed.cpu_offload=false",
        )


def _rollback(config: Config, launch: Launch) -> Iterator[Violation]:
    guard, checkpoint = config.guard, config.checkpoint
    goes_back = guard.spike_zscore is not None and guard.spike_action is SpikeAction.rollback
    if goes_back and checkpoint.interval is None and checkpoint.every_minutes is None:
        yield Violation(
            "guard.spike_action",
            "is rollback but the run saves no checkpoint on its way; set checkpoint.interval or .every_minutes",
        )


def _paths(config: Config, launch: Launch) -> Iterator[Violation]:
    """Files a run would read are there, so that nobody waits in a queue to learn that they are not."""
    for group in fields(config):
        node = getattr(config, group.name)
        for item in fields(node) if is_dataclass(node) else ():
            value = getattr(node, item.name)
            if item.metadata.get("path") and value is not None and not _exists(str(value)):
                yield Violation(f"{group.name}.{item.name}", f"is {value} but there is no such file or folder")


def _exists(path: str) -> bool:
    if any(character in path for character in "*?["):
        anchor = Path(path).anchor or "."
        return any(True for _ in Path(anchor).glob(str(Path(path).relative_to(Path(path).anchor or "."))))
    return Path(path).exists()


RULES: tuple[Rule, ...] = (
    _budget,
    _batch,
    _accumulation,
    _learning_rates,
    _lengths,
    _kinds,
    _loss,
    _metrics,
    _launcher,
    _strategy,
    _precision,
    _rollback,
    _paths,
)
