"""How fast a run trains: samples, tokens and FLOPs per second, and the share of the device's peak."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from foundry.config.schemas.precision import PrecisionMode
from foundry.parallel.device import (
    allocator_retries,
    device_name,
    peak_memory_bytes,
    reserved_memory_bytes,
    synchronize,
)

# Dense peaks in TFLOP/s of the arithmetic training uses: products of bf16 and of fp16 matrices summed in fp32, TF32,
# and plain fp32. Headline numbers often count 2:4 sparsity, or on GeForce cards fp16 sums: they are halved here.
# None: the device lacks the arithmetic, or the figure is not known to three digits. Volta and Turing have no TF32:
# torch computes in fp32 there. Sources: NVIDIA's data sheet of each product; the Hopper white paper for SXM5; the
# Blackwell architecture technical brief, table 3, and the HGX data sheets for B200 and B300, per GPU; a 72nd of the
# NVL72 data sheets' figures for GB200 and GB300; the appendices of the white papers of GA102 (RTX A6000), Ada (RTX 3090
# Ti, 4080 and 6000), RTX Blackwell (GeForce) and RTX PRO Blackwell; AMD's Instinct data sheets.
# A name must match as a whole.
_PEAKS: tuple[tuple[str, float | None, float | None, float | None, float | None], ...] = (
    # name, bf16, fp16, TF32, fp32
    (r"GB200", 2500.0, 2500.0, 1250.0, 80.0),
    (r"GB300", 2500.0, 2500.0, 1250.0, None),
    (r"B200", 2250.0, 2250.0, 1125.0, 75.0),
    (r"B300", 2250.0, 2250.0, 1125.0, 75.0),
    (r"H200 NVL", 835.5, 835.5, 417.5, 60.0),
    (r"G?H200", 989.4, 989.4, 494.7, 66.9),
    (r"H100 NVL", 835.5, 835.5, 417.5, 60.0),
    (r"H[18]00(?: 80GB)? PCIe", 756.5, 756.5, 378.0, 51.2),
    (r"H[18]00", 989.4, 989.4, 494.7, 66.9),
    (r"H20", 148.0, 148.0, 74.0, 44.0),
    (r"A[18]00", 312.0, 312.0, 156.0, 19.5),
    (r"A40", 149.7, 149.7, 74.8, 37.4),
    (r"A30", 165.0, 165.0, 82.0, 10.3),
    (r"A10G", 70.0, 70.0, 35.0, 35.0),
    (r"A10", 125.0, 125.0, 62.5, 31.2),
    (r"L40S", 362.05, 362.05, 183.0, 91.6),
    (r"L40", 181.05, 181.05, 90.5, 90.5),
    (r"L4", 121.0, 121.0, 60.0, 30.3),
    (r"RTX A6000", 154.8, 154.8, 77.4, 38.7),
    (r"RTX 6000 Ada Generation", 364.2, 364.2, 182.1, 91.1),
    (r"RTX PRO 6000 Blackwell Workstation Edition", 503.8, 503.8, 251.9, 126.0),
    (r"RTX 5090", 209.5, 209.5, 104.8, 104.8),
    (r"RTX 5080", 112.6, 112.6, 56.3, 56.3),
    (r"RTX 4090", 165.2, 165.2, 82.6, 82.6),
    (r"RTX 4080", 97.5, 97.5, 48.7, 48.7),
    (r"RTX 3090 Ti", 80.0, 80.0, 40.0, 40.0),
    (r"RTX 3090", 71.2, 71.2, 35.6, 35.6),
    (r"V100-SXM2", None, 125.0, 15.7, 15.7),
    (r"V100-PCIE", None, 112.0, 14.0, 14.0),
    (r"T4", None, 65.0, 8.1, 8.1),
    (r"MI355X", 2516.6, 2516.6, None, 157.3),
    (r"MI325X", 1307.4, 1307.4, None, 163.4),
    (r"MI300X", 1307.4, 1307.4, None, 163.4),
    (r"MI250X", 191.5, 191.5, None, 23.95),  # one of the card's two dies: that is what a rank sees
)
_MAKER = r"(?:(?:NVIDIA|AMD|Tesla|GeForce|Instinct)\s+)*"
_FORM = r"(?:[ -](?:SXM\d?|PCIe|OAM|AC|\d+GB?|HBM\d\w?|3e))*"


def peak_flops(name: str, precision: PrecisionMode, *, tf32: bool = False) -> float | None:
    """Dense peak of a device in FLOP/s; None where it is not known, as for a slice (MIG) or a laptop's variant.

    Args:
        name: of the device, from `foundry.parallel.device.device_name`.
        precision: what the matrix products are computed in.
        tf32: whether those of fp32 matrices are computed in TF32.
    """
    for known, bf16, fp16, rounded, fp32 in _PEAKS:
        if re.fullmatch(_MAKER + known + _FORM, name.strip(), re.IGNORECASE):
            exact = rounded if tf32 else fp32
            tflops = {PrecisionMode.fp32: exact, PrecisionMode.amp_float16: fp16}.get(precision, bf16)
            return None if tflops is None else tflops * 1e12
    return None


@dataclass(frozen=True)
class Rates:
    """The speed since the last logged step, over all ranks except where it says per rank.

    Attributes:
        tflops: TFLOP/s per rank of the model's arithmetic; None where its FLOPs are not known.
        mfu: `tflops` as a share of the device's peak; None where that is not known.
        peak_memory_bytes: of this rank, since the start of the run; on a CPU, of the process.
        reserved_memory_bytes: most that torch has taken from this rank's GPU, its cache included; None on a CPU.
        allocator_retries: how often that GPU was full until torch gave its cache back; None on a CPU.
    """

    samples_per_second: float
    tokens_per_second: float | None
    step_seconds: float
    tflops: float | None
    mfu: float | None
    peak_memory_bytes: int
    reserved_memory_bytes: int | None
    allocator_retries: int | None


class Throughput:
    """Measures between logged steps; what happens under `pause()` does not count.

    It reads the clock only: the caller logs where the device has caught up anyhow, by reading the loss.

    Args:
        world_size: ranks that train together.
        device: this rank's.
        precision: what the matrix products are computed in; decides the peak.
        tf32: whether those of fp32 matrices are computed in TF32; decides it, too.
        flops_per_sample: of one sample's forward and backward pass, recomputation not counted; None where not known.
        tokens_per_sample: tokens in the sample of `flops_per_sample`; None where samples have none.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        *,
        world_size: int,
        device: torch.device,
        precision: PrecisionMode,
        tf32: bool = False,
        flops_per_sample: float | None = None,
        tokens_per_sample: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._world_size = world_size
        self._device = device
        self._flops_per_sample = flops_per_sample
        self._tokens_per_sample = tokens_per_sample
        self._clock = clock
        self._peak = peak_flops(device_name(device), precision, tf32=tf32)
        self._since = clock()
        self._paused_seconds = 0.0
        self._step = 0
        self._samples = 0
        self._tokens: int | None = None

    def start(self, step: int, samples: int, tokens: int | None = None) -> None:
        """Measure from now on.

        Args:
            step: optimizer steps already taken; a run that was resumed or went back does not start at 0.
            samples: samples already consumed.
            tokens: likewise; None where none are counted.
        """
        self._since, self._paused_seconds = self._clock(), 0.0
        self._step, self._samples, self._tokens = step, samples, tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A context whose duration is no training time: evaluation, drawing samples, checkpoints.

        It does not wait for the device if the body raises: where another rank is gone, a collective never ends, and
        the exception would wait with it.
        """
        synchronize(self._device)
        begin = self._clock()
        yield
        synchronize(self._device)
        self._paused_seconds += self._clock() - begin

    def log(self, step: int, samples: int, tokens: int | None = None) -> Rates:
        """The rates since the last call, which then start anew.

        Args:
            step: optimizer steps taken so far.
            samples: samples consumed so far, over all ranks.
            tokens: likewise; None where none are counted.
        """
        now = self._clock()
        seconds = max(now - self._since - self._paused_seconds, 1e-9)
        samples_per_second = (samples - self._samples) / seconds
        step_seconds = seconds / max(step - self._step, 1)
        tokens_per_second = None if tokens is None else (tokens - (self._tokens or 0)) / seconds
        flops = self._flops_per_second(samples_per_second, tokens_per_second)
        self._since, self._paused_seconds = now, 0.0
        self._step, self._samples, self._tokens = step, samples, tokens
        return Rates(
            samples_per_second=samples_per_second,
            tokens_per_second=tokens_per_second,
            step_seconds=step_seconds,
            tflops=None if flops is None else flops / 1e12,
            mfu=None if flops is None or self._peak is None else flops / self._peak,
            peak_memory_bytes=peak_memory_bytes(self._device),
            reserved_memory_bytes=reserved_memory_bytes(self._device),
            allocator_retries=allocator_retries(self._device),
        )

    def _flops_per_second(self, samples: float, tokens: float | None) -> float | None:
        """Per rank; samples with other numbers of tokens than usual count by their tokens."""
        if self._flops_per_sample is None:
            return None
        whole = samples if tokens is None or self._tokens_per_sample is None else tokens / self._tokens_per_sample
        return whole * self._flops_per_sample / self._world_size
