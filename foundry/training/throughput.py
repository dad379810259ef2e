"""Throughput: samples, tokens and FLOPs per second, and MFU."""

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

# Dense peaks in TFLOP/s of the arithmetic used in training: products of bf16 and of fp16 matrices with fp32
# accumulation, TF32, and plain fp32. Headline numbers often assume 2:4 sparsity, or on GeForce cards fp16 accumulation:
# they are halved here. None: the device lacks the arithmetic, or the figure is not known to three digits. Volta and
# Turing have no TF32: torch computes in fp32 there. Sources: NVIDIA's data sheet of each product; the Hopper white
# paper for SXM5; the Blackwell architecture technical brief, table 3, and the HGX data sheets for B200 and B300, per
# GPU; a 72nd of the NVL72 data sheets' figures for GB200 and GB300; the appendices of the white papers of GA102 (RTX
# A6000), Ada (RTX 3090 Ti, 4080 and 6000), RTX Blackwell (GeForce) and RTX PRO Blackwell; AMD's Instinct data sheets.
# A device name must match a pattern below completely, apart from maker and form factor.
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
    (r"MI250X", 191.5, 191.5, None, 23.95),  # one of the card's two dies, which is the device of a rank
)
_MAKER = r"(?:(?:NVIDIA|AMD|Tesla|GeForce|Instinct)\s+)*"
_FORM = r"(?:[ -](?:SXM\d?|PCIe|OAM|AC|\d+GB?|HBM\d\w?|3e))*"


def peak_flops(name: str, precision: PrecisionMode, *, tf32: bool = False) -> float | None:
    """Return the dense peak of a device in FLOP/s; None if unknown, as for a MIG slice or a laptop variant.

    Args:
        name: device name from `foundry.parallel.device.device_name`.
        precision: precision of the matrix products.
        tf32: whether fp32 matrix products use TF32.
    """
    for pattern, bf16, fp16, rounded, fp32 in _PEAKS:
        if re.fullmatch(_MAKER + pattern + _FORM, name.strip(), re.IGNORECASE):
            exact = rounded if tf32 else fp32
            tflops = {PrecisionMode.fp32: exact, PrecisionMode.amp_float16: fp16}.get(precision, bf16)
            return None if tflops is None else tflops * 1e12
    return None


@dataclass(frozen=True)
class Rates:
    """Throughput since the last logged step, over all ranks unless stated otherwise.

    Attributes:
        samples_per_second: samples per second.
        tokens_per_second: tokens per second; None if samples have no tokens.
        step_seconds: seconds per optimizer step.
        tflops: TFLOP/s of the model per rank; None if its FLOPs are unknown.
        mfu: `tflops` as a fraction of the device's peak; None if the peak is unknown.
        peak_memory_bytes: peak memory in tensors on this rank's GPU since the start of the run; on a CPU, peak resident
            memory of the process.
        reserved_memory_bytes: most memory that torch has reserved on this rank's GPU, including its cache; None on a
            CPU.
        allocator_retries: how often this rank's GPU was full until torch freed its cache; None on a CPU.
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
    """Measures throughput between logged steps; time spent under `pause()` does not count.

    `log` does not synchronize with the device: the trainer calls it after it has read the loss, which waits for the
    device. `pause` synchronizes.

    Args:
        world_size: number of ranks.
        device: device of this rank.
        precision: precision of the matrix products; determines the peak.
        tf32: whether fp32 matrix products use TF32; also determines the peak.
        flops_per_sample: FLOPs of one sample's forward and backward pass, without recomputation; None if unknown.
        tokens_per_sample: tokens in the sample of `flops_per_sample`; None if samples have no tokens.
        clock: clock in monotonic seconds.
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
        """Start measuring now.

        Args:
            step: optimizer steps already taken; not 0 after a resume or a rollback.
            samples: samples already consumed.
            tokens: tokens already consumed; None if tokens are not counted.
        """
        self._since, self._paused_seconds = self._clock(), 0.0
        self._step, self._samples, self._tokens = step, samples, tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Context manager that excludes its duration from training time: for evaluation, sampling and checkpoints.

        It does not synchronize with the device if the body raises: if another rank is gone, a collective never ends,
        and the exception would never be shown.
        """
        synchronize(self._device)
        begin = self._clock()
        yield
        synchronize(self._device)
        self._paused_seconds += self._clock() - begin

    def log(self, step: int, samples: int, tokens: int | None = None) -> Rates:
        """Return the throughput since the last call of `log` or `start`, and start the next measurement.

        Args:
            step: optimizer steps taken so far.
            samples: samples consumed so far, over all ranks.
            tokens: tokens consumed so far, over all ranks; None if tokens are not counted.
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
        """Return FLOP/s per rank; FLOPs are scaled by the number of tokens if samples differ in length."""
        if self._flops_per_sample is None:
            return None
        num_samples = samples if tokens is None or self._tokens_per_sample is None else tokens / self._tokens_per_sample
        return num_samples * self._flops_per_sample / self._world_size
