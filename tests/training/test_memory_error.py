import pytest
import torch
from torch import nn

from foundry.config.data import StdlibText
from foundry.config.distributed import DDP, FSDP, HSDP, Distributed, GradientSync, Single
from foundry.config.hparams import HParams
from foundry.config.model import Transformer
from foundry.config.precision import Precision, PrecisionMode
from foundry.config.root import Config
from foundry.parallel.wrap import resolve_strategy
from foundry.training.memory_error import DeviceMemory, explain_out_of_memory, measure_device_memory

GIB = 2**30
ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB")
ACTIVATIONS = DeviceMemory(
    weights=4 * GIB,
    gradients=4 * GIB,
    optimizer=8 * GIB,
    ema=0,
    allocated=76 * GIB,
    reserved=78 * GIB,
    capacity=79 * GIB,
)
STATES = DeviceMemory(
    weights=18 * GIB,
    gradients=18 * GIB,
    optimizer=36 * GIB,
    ema=0,
    allocated=76 * GIB,
    reserved=76 * GIB,
    capacity=79 * GIB,
)
BATCH, CHECKPOINTING, TILES = (
    "hparams.per_gpu_batch_size=4",
    "hparams.grad_checkpointing=true",
    "model.logprob_tile_tokens=1024",
)


def config(distributed, *, hparams=None, model=None, mode=PrecisionMode.amp_bfloat16):
    return Config(
        hparams=HParams(**{"global_batch_size": 64, "per_gpu_batch_size": 8, **(hparams or {})}),
        model=Transformer(**(model or {})),
        data=StdlibText(seq_len=256),
        distributed=distributed,
        precision=Precision(mode=mode),
    )


def explained(memory=ACTIVATIONS, *, of, world_size=1):
    strategy = resolve_strategy(of.distributed, world_size)
    text = explain_out_of_memory(ERROR, memory, of, strategy=strategy, step=12, rank=0, world_size=world_size)
    return text.splitlines()


def settings(lines):
    return [line.split(": ")[0].strip() for line in lines[2:]]


def test_the_first_lines_say_what_took_the_memory():
    lines = explained(of=config(Single()))
    assert lines[0] == (
        "out of GPU memory in step 12 on rank 0: 2.50 GiB more were wanted, 76.00 GiB of 79.00 GiB are in use"
    )
    assert lines[1] == (
        "  weights 4.00 GiB, gradients 4.00 GiB, optimizer state 8.00 GiB, activations and the like 60.00 GiB, "
        "cached, in pieces 2.00 GiB"
    )


def test_what_is_largest_is_mended_first():
    alone = ["distributed=fsdp distributed.nproc_per_node=2", "distributed=fsdp distributed.cpu_offload=true"]
    assert settings(explained(of=config(Single()))) == [BATCH, CHECKPOINTING, TILES, *alone]
    assert settings(explained(STATES, of=config(Single()))) == [*alone, BATCH, CHECKPOINTING, TILES]


def test_nothing_is_suggested_that_is_set_already():
    small = {"per_gpu_batch_size": 1, "global_batch_size": 2, "grad_checkpointing": True}
    tiled = {"logprob_tile_tokens": 512}
    done = config(FSDP(cpu_offload=True, gradient_sync=GradientSync.every), hparams=small, model=tiled)
    assert settings(explained(of=done, world_size=2)) == ["every setting that saves memory is on"]


@pytest.mark.parametrize(
    ("distributed", "suggested"),
    [
        (DDP(), ["distributed=fsdp", "distributed=fsdp distributed.cpu_offload=true"]),
        (HSDP(num_replicas=2), ["distributed=fsdp", "distributed.gradient_sync=every", "distributed.cpu_offload=true"]),
        (Distributed(), ["distributed.gradient_sync=every", "distributed=fsdp distributed.cpu_offload=true"]),
        (
            FSDP(reshard_after_forward=False, gradient_sync=GradientSync.last_keep_params),
            [
                "distributed.gradient_sync=every",
                "distributed.reshard_after_forward=true",
                "distributed.cpu_offload=true",
            ],
        ),
    ],
)
def test_states_are_divided_or_moved(distributed, suggested):
    of = config(distributed, hparams={"per_gpu_batch_size": 1, "grad_checkpointing": True})
    assert settings(explained(of=of, world_size=4)) == suggested


def test_only_what_the_rules_accept():
    fp16 = config(FSDP(gradient_sync=GradientSync.every), mode=PrecisionMode.amp_float16)
    assert not any("cpu_offload" in setting for setting in settings(explained(of=fp16, world_size=2)))
    without = config(FSDP(), hparams={"global_batch_size": 16})  # one microbatch: there is no window to accumulate over
    assert not any("gradient_sync" in setting for setting in settings(explained(of=without, world_size=2)))


@pytest.mark.parametrize(("size", "smaller", "times"), [(8, 4, 2), (9, 3, 3), (6, 3, 2), (7, 1, 7)])
def test_a_smaller_microbatch_still_divides_the_batch(size, smaller, times):
    of = config(Single(), hparams={"per_gpu_batch_size": size, "global_batch_size": 8 * size})
    line = explained(of=of)[2].strip()
    assert line.startswith(f"hparams.per_gpu_batch_size={smaller}: {times} times less activations")


def test_parts_are_counted_on_their_device_only(monkeypatch):
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    stats = {"allocated_bytes.all.peak": 1000, "reserved_bytes.all.current": 2000}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1, 3000))
    weights = 4 * (3 * 5 + 5)
    here = measure_device_memory(model, [optimizer], torch.device("cpu"), averages=[model.weight])
    # AdamW has two moments, and a step count of four bytes for each of the two parameters.
    assert (here.weights, here.gradients, here.optimizer, here.ema) == (weights, weights, 2 * weights + 8, 60)
    assert here.rest == 1000 - 4 * weights - 68
    other = measure_device_memory(model, [optimizer], torch.device("meta"))
    assert (other.weights, other.gradients, other.optimizer, other.rest) == (0, 0, 0, 1000)
