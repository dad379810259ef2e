import errno
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.devices import FakeGpus
from torch import nn

from foundry.config.schemas.data import StdlibText
from foundry.config.schemas.distributed import DDP, FSDP, HSDP, Distributed, GradientSync, Single, resolve_distributed
from foundry.config.schemas.hparams import HParams
from foundry.config.schemas.model import Transformer
from foundry.config.schemas.objective import NextToken
from foundry.config.schemas.precision import Precision, PrecisionMode
from foundry.config.schemas.root import Config
from foundry.tasks.post_training.schemas.objective import DPO
from foundry.training import memory_error
from foundry.training.memory_error import (
    DeviceMemory,
    OutOfMemoryError,
    explain_out_of_memory,
    is_out_of_memory,
    measure_device_memory,
    memory_explained,
)

GIB = 2**30
ERROR = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79 GiB")
ACTIVATIONS = DeviceMemory(
    parts={"weights": 4 * GIB, "gradients": 4 * GIB, "optimizer state": 8 * GIB, "averaged weights": 0},
    allocated=76 * GIB,
    reserved=78 * GIB,
    capacity=79 * GIB,
)
STATES = DeviceMemory(
    parts={"weights": 18 * GIB, "gradients": 18 * GIB, "optimizer state": 36 * GIB},
    allocated=76 * GIB,
    reserved=76 * GIB,
    capacity=79 * GIB,
)
BATCH, CHECKPOINTING, TILES = (
    "hparams.per_gpu_batch_size=4",
    "hparams.grad_checkpointing=true",
    "model.logprob_tile_tokens=1024",
)
LAST, EVERY = GradientSync.last, "distributed.gradient_sync=every"

ALONE = ["distributed=fsdp distributed.nproc_per_node=2", "distributed=fsdp distributed.cpu_offload=true"]


def config(distributed, *, hparams=None, model=None, mode=PrecisionMode.amp_bfloat16, objective=DPO):
    return Config(
        hparams=HParams(**{"global_batch_size": 64, "per_gpu_batch_size": 8, **(hparams or {})}),
        model=Transformer(**(model or {})),
        data=StdlibText(seq_len=256),
        objective=objective(),
        distributed=distributed,
        precision=Precision(mode=mode),
    )


def explained(memory=ACTIVATIONS, *, of, world_size=1):
    distributed = resolve_distributed(of.distributed, world_size)
    text = explain_out_of_memory(
        ERROR, memory, of, distributed=distributed, moment="in step 12", rank=0, world_size=world_size
    )
    return text.splitlines()


def settings(lines):
    return [line.split(": ")[0].strip() for line in lines[2:]]


def test_out_of_memory_message_lists_memory_by_part():
    lines = explained(of=config(Single()))
    assert lines[0] == (
        "out of GPU memory in step 12 on rank 0: 2.50 GiB more were requested, 76.00 GiB of 79.00 GiB are in use"
    )
    assert lines[1] == (
        "  weights 4.00 GiB, gradients 4.00 GiB, optimizer state 8.00 GiB, "
        "activations and temporary buffers 60.00 GiB, cached (fragmented) 2.00 GiB"
    )


def test_out_of_memory_remedies_start_with_the_largest_part():
    assert settings(explained(of=config(Single()))) == [BATCH, CHECKPOINTING, TILES, *ALONE]
    assert settings(explained(STATES, of=config(Single()))) == [*ALONE, BATCH, CHECKPOINTING, TILES]


def test_tile_remedy_is_suggested_only_if_all_logits_exist():
    assert settings(explained(of=config(Single(), objective=NextToken)))[:3] == [BATCH, CHECKPOINTING, ALONE[0]]


def test_settings_already_active_are_not_suggested():
    small = {"per_gpu_batch_size": 1, "global_batch_size": 2, "grad_checkpointing": True}
    tiled = {"logprob_tile_tokens": 512}
    done = config(FSDP(cpu_offload=True), hparams=small, model=tiled)
    assert settings(explained(of=done, world_size=2)) == ["every setting that saves memory is on"]


@pytest.mark.parametrize(
    ("distributed", "suggested"),
    [
        (DDP(), ["distributed=fsdp", "distributed=fsdp distributed.cpu_offload=true"]),
        (HSDP(num_replicas=2), ["distributed=fsdp", "distributed.cpu_offload=true"]),
        (Distributed(gradient_sync=LAST), [EVERY, "distributed=fsdp distributed.cpu_offload=true"]),
        (
            FSDP(reshard_after_forward=False, gradient_sync=GradientSync.last_keep_params),
            [
                EVERY,
                "distributed.reshard_after_forward=true",
                "distributed.cpu_offload=true",
            ],
        ),
    ],
)
def test_remedies_shard_or_offload_states_by_strategy(distributed, suggested):
    of = config(distributed, hparams={"per_gpu_batch_size": 1, "grad_checkpointing": True})
    assert settings(explained(of=of, world_size=4)) == suggested


def test_remedies_refused_by_config_rules_are_not_suggested():
    fp16 = config(FSDP(), mode=PrecisionMode.amp_float16)
    assert not any("cpu_offload" in setting for setting in settings(explained(of=fp16, world_size=2)))
    without = config(
        FSDP(gradient_sync=LAST), hparams={"global_batch_size": 16}
    )  # A single microbatch: nothing is accumulated.
    assert not any("gradient_sync" in setting for setting in settings(explained(of=without, world_size=2)))


@pytest.mark.parametrize(("size", "smaller", "times"), [(8, 4, 2), (9, 3, 3), (6, 3, 2), (7, 1, 7)])
def test_suggested_microbatch_divides_the_batch(size, smaller, times):
    of = config(Single(), hparams={"per_gpu_batch_size": size, "global_batch_size": 8 * size})
    line = explained(of=of)[2].strip()
    assert line.startswith(f"hparams.per_gpu_batch_size={smaller}: activations / {times}, ")


def test_memory_parts_are_counted_on_their_device_only(monkeypatch):
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    in_use = {"allocated": 1000, "reserved": 2000, "capacity": 3000}
    monkeypatch.setattr(memory_error, "_in_use", lambda device: in_use)
    weights = 4 * (3 * 5 + 5)
    here = measure_device_memory(model, [optimizer], torch.device("cpu"), averages=[model.weight])
    # AdamW has two moments, and a four-byte step count for each of the two parameters.
    assert list(here.parts.values()) == [weights, weights, 2 * weights + 8, 60, 0]
    assert here.rest == 1000 - 4 * weights - 68
    other = measure_device_memory(model, [optimizer], torch.device("meta"))
    assert (list(other.parts.values()), other.rest) == ([0] * 5, 1000)


def test_gpu_memory_in_use_is_the_current_allocation(monkeypatch):
    FakeGpus(allocated=30 * GIB, peak=70 * GIB, reserved=40 * GIB, total=79 * GIB).replace_torchs(monkeypatch)
    gpu = torch.device("cuda", 0)
    memory = measure_device_memory(nn.Linear(2, 2), [], gpu)
    assert (memory.allocated, memory.reserved, memory.capacity) == (30 * GIB, 40 * GIB, 79 * GIB)
    with pytest.raises(OutOfMemoryError, match=r"30\.00 GiB of 79\.00 GiB are in use"), memory_explained(gpu, 0):
        raise ERROR


def ask_torch():
    return torch.empty(2**50)


def ask_numpy():
    return np.empty(2**57, dtype=np.uint8)


def ask_python():
    return bytearray(2**60)


def fork():
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def native_code():
    raise RuntimeError("std::bad_alloc")


HOST = [(ask_torch, "4.00 PiB"), (ask_numpy, "128. PiB"), (ask_python, ""), (fork, ""), (native_code, "")]


@pytest.mark.parametrize(("ask", "wanted"), HOST, ids=lambda value: getattr(value, "__name__", ""))
def test_host_out_of_memory_is_recognized_from_any_of_its_errors(ask, wanted):
    cpu = torch.device("cpu")
    with pytest.raises(OutOfMemoryError) as caught, memory_explained(cpu, 3):
        ask()
    assert str(caught.value).startswith("out of CPU memory on rank 3 while the run was built: ")
    assert f"{wanted} more were requested" in str(caught.value) if wanted else "requested" not in str(caught.value)
    assert "of " in str(caught.value).splitlines()[0]
    with pytest.raises(OutOfMemoryError) as again, memory_explained(cpu, 0):
        raise caught.value
    assert again.value is caught.value


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes do not match"), OSError(errno.ENOSPC, "No space left"), KeyError()]
)
def test_other_errors_are_not_reported_as_out_of_memory(error):
    assert not is_out_of_memory(error)
    with pytest.raises(type(error)), memory_explained(torch.device("cpu"), 0):
        raise error


def test_cpu_out_of_memory_message_lists_process_memory_and_remedies():
    model = nn.Linear(512, 512)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 512)).sum().backward()
    optimizer.step()
    memory = measure_device_memory(model, [optimizer], torch.device("cpu"))
    assert memory.parts["weights"] == memory.parts["gradients"] == 4 * 512 * 513
    assert sum(memory.parts.values()) < memory.allocated < memory.capacity
    try:
        ask_torch()
    except RuntimeError as error:
        lines = explain_out_of_memory(
            error, memory, config(FSDP()), distributed=FSDP(), moment="in step 12", rank=1, world_size=2
        ).splitlines()
    assert lines[0].startswith("out of CPU memory in step 12 on rank 1: 4.00 PiB more were requested, ")
    assert lines[1].startswith("  weights 1.0 MiB, gradients 1.0 MiB, optimizer state 2.0 MiB, ")
    assert settings(lines) == [BATCH, CHECKPOINTING, TILES, "otherwise"]


def test_frozen_models_are_listed_as_a_memory_part():
    model, reference = nn.Linear(4, 8), nn.Linear(4, 8)
    memory = measure_device_memory(model, [], torch.device("cpu"), frozen=[reference])
    assert memory.parts["frozen models"] == memory.parts["weights"] == 4 * (4 * 8 + 8)
    parts = {**ACTIVATIONS.parts, "frozen models": 2 * GIB}
    lines = explained(replace(ACTIVATIONS, parts=parts), of=config(Single()))
    assert "frozen models 2.00 GiB" in lines[1]
