"""Whether the blocks of a model are compiled during a run, and how often they are compiled again."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from foundry.core.protocols import Window
from foundry.parallel.compilation import compile_blocks, count_graphs, missing_compiler, uncompile_blocks
from foundry.parallel.process_group import World
from foundry.training.signals import Boundary

log = logging.getLogger(__name__)

_MEASURED_STEPS = 3
"""Over so many steps at least the time of one is measured."""
_SETTLING_STEPS = 3
"""In so many steps all graphs of a run are compiled, one of a second shape with a dynamic size included."""
_MAX_SHAPES = 2
"""Of microbatches: the usual one, and a smaller last one."""

_DECISIONS = int(Boundary.COMPILE | Boundary.EAGER)


@dataclass(frozen=True)
class Expected:
    """What compiling the blocks is expected to take and to give on a kind of device.

    Attributes:
        seconds: until the first compiled step is done.
        saved: share of a step's time that a compiled one does without.
    """

    seconds: float
    saved: float


EXPECTED = {
    # Meant to be wrong on the side of not compiling. torchtitan's 8B on eight H100 goes from 5,762 to 6,667 tokens a
    # second and GPU, 14 % less time a step; not measured here.
    "cuda": Expected(seconds=90.0, saved=0.1),
    # Between a tenth more and nearly half less of a step, in 40 to 145 s: docs/distributed.md#compiling.
    "cpu": Expected(seconds=120.0, saved=0.05),
}


class _StepTime:
    """Seconds of a step, over intervals between logged ones without the first, which has what is done only once."""

    def __init__(self) -> None:
        self._is_warm, self._steps, self._seconds = False, 0, 0.0

    def add(self, steps: int, step_seconds: float) -> float | None:
        """Add an interval; the mean once there are steps enough."""
        if self._is_warm:
            self._steps, self._seconds = self._steps + steps, self._seconds + steps * step_seconds
        self._is_warm = True
        return self._seconds / self._steps if self._steps >= _MEASURED_STEPS else None


class Compiling:
    """Compiles the blocks at a step boundary, where that pays within the run, and watches compiled ones.

    Rank 0 decides by its own time of a step, and tells the others with the flags that ranks exchange at each boundary,
    so that all compile after the same step. Where compiled steps turn out to be no faster, all go back to what they
    were. What is decided is part of a checkpoint: a resumed run does not measure again.

    Args:
        wanted: True, the blocks are compiled already; False; None, they are where it pays.
        blocks: of the model as it is trained.
        world: this rank and the others.
        obstacle: why a run that may choose does not compile, whatever it would save.
    """

    def __init__(
        self, *, wanted: bool | None, blocks: Sequence[nn.Module], world: World, obstacle: str | None = None
    ) -> None:
        self._decided, self._chooses = wanted, wanted is None
        self._blocks, self._world, self._obstacle = blocks, world, obstacle
        self._pending = 0
        self._shapes = set[tuple[Any, ...]]()
        self._step_time, self._unlogged_steps = _StepTime(), 0
        self._eager_seconds: float | None = None
        self._compiled_steps = 0
        self._recompiled = self._reported = 0

    @property
    def flags(self) -> int:
        """What rank 0 has to say at this boundary: what it decides, once."""
        flags, self._pending = self._pending, 0
        return flags

    def obey(self, agreed: int) -> None:
        """Do what rank 0 has decided, given the flags that all ranks see."""
        if agreed & _DECISIONS:
            self._decide(bool(agreed & Boundary.COMPILE))

    def around(self, window: Window) -> AbstractContextManager[None]:
        """An optimizer step: shapes are looked at until it is decided, and graphs counted once there are any."""
        if self._decided is None:
            self._shapes |= {_shapes_of(microbatch) for microbatch in window.microbatches}
        self._unlogged_steps += 1
        return self._counted() if self._decided else nullcontext()

    def after_log(self, step_seconds: float, steps_left: int) -> None:
        """Think about what the device's clock says, where a logged step has waited for the device anyhow.

        Args:
            step_seconds: of each step since the last logged one.
            steps_left: until the end of the run.
        """
        if self._recompiled > self._reported and self._world.is_main:
            log.warning(
                "torch.compile has compiled %d more graphs after its first %d steps, since shapes of batches change:"
                " give all samples one length, or set hparams.torchcompile=false",
                self._recompiled,
                _SETTLING_STEPS,
            )
        self._reported = self._recompiled
        steps, self._unlogged_steps = self._unlogged_steps, 0
        is_measuring = self._eager_seconds is not None if self._decided is not None else self._chooses
        is_settling = self._decided and self._compiled_steps <= _SETTLING_STEPS
        if not is_measuring or is_settling or self._pending or not self._world.is_main:
            return
        if (seconds := self._step_time.add(steps, step_seconds)) is None:
            return
        self._step_time = _StepTime()
        if self._eager_seconds is None:
            pays = self._pays(seconds, steps_left)
            self._pending = Boundary.COMPILE if pays else Boundary.EAGER
            self._eager_seconds = seconds if pays else None
        else:
            self._pending = 0 if self._is_faster(seconds, self._eager_seconds) else Boundary.EAGER
            self._eager_seconds = None

    def state_dict(self) -> dict[str, Any]:
        """What has been decided; plain JSON, the same on every rank."""
        return {"compiled": self._decided if self._chooses else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do as the run that is resumed has decided, unless this one has decided already."""
        if self._decided is None and state["compiled"] is not None:
            if self._world.is_main:
                done = "are compiled" if state["compiled"] else "stay as they are"
                log.info("hparams.torchcompile=auto: the blocks %s, as before the run was resumed", done)
            self._decide(state["compiled"])

    @contextmanager
    def _counted(self) -> Iterator[None]:
        before = count_graphs()
        yield
        self._compiled_steps += 1
        if self._compiled_steps > _SETTLING_STEPS:
            self._recompiled += count_graphs() - before

    def _decide(self, is_compiled: bool) -> None:
        if is_compiled:
            compile_blocks(self._blocks)
        elif self._decided:
            uncompile_blocks(self._blocks)
        self._decided = is_compiled

    def _is_faster(self, seconds: float, eager_seconds: float) -> bool:
        """Whether compiled steps take less time than those before; says so."""
        is_faster = seconds < eager_seconds
        outcome = "blocks stay compiled" if is_faster else "blocks are no longer compiled"
        message = "hparams.torchcompile=auto: a compiled step takes %.3g s, and one before took %.3g s: %s"
        log.info(message, seconds, eager_seconds, outcome)
        return is_faster

    def _pays(self, step_seconds: float, steps_left: int) -> bool:
        """Whether compiling saves more time than it takes; says so."""
        device = self._world.device
        expected, obstacle = EXPECTED.get(device.type), self._obstacle
        if not self._blocks:
            obstacle = "the model has none"
        elif (compiler := missing_compiler(device)) is not None:
            obstacle = f"there is no {compiler} on this machine"
        elif len(self._shapes) > _MAX_SHAPES:
            obstacle = f"microbatches had {len(self._shapes)} shapes, and each would be compiled for itself"
        elif expected is None:
            obstacle = f"what it gives on {device.type} is not known"
        if obstacle is not None or expected is None:
            log.info("hparams.torchcompile=auto: blocks are not compiled: %s", obstacle)
            return False
        saved = steps_left * step_seconds * expected.saved
        log.info(
            "hparams.torchcompile=auto: blocks are %s: %d more steps of %.3g s would take about %.3g s less, at %.0f"
            " %% each, and compiling takes about %.3g s",
            "compiled" if saved > expected.seconds else "not compiled",
            steps_left,
            step_seconds,
            saved,
            100 * expected.saved,
            expected.seconds,
        )
        return saved > expected.seconds


def _shapes_of(microbatch: Mapping[str, Tensor]) -> tuple[Any, ...]:
    return tuple((name, *tensor.shape) for name, tensor in sorted(microbatch.items()))
