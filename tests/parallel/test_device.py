"""Device selection and memory, with fake GPUs."""

import os
import subprocess
import sys
from dataclasses import replace
from mmap import mmap
from pathlib import Path

import pytest
import torch
from support.devices import FakeGpus

from foundry.config import environment
from foundry.config.environment import STORE, detect
from foundry.config.schemas.device import DeviceKind
from foundry.config.schemas.distributed import DDP, FSDP, HSDP, Backend, Distributed, Single
from foundry.core.errors import ConfigError
from foundry.parallel import device as device_module
from foundry.parallel.device import (
    allocator_retries,
    choose_device,
    describe_devices,
    free_memory,
    host_capacity,
    peak_memory_bytes,
    resident_bytes,
)
from foundry.parallel.process_group import _device, process_group


@pytest.mark.parametrize(
    ("count", "variables", "expected"),
    [
        (8, {}, 1),
        (1, {"CUDA_VISIBLE_DEVICES": "1"}, 0),  # As set by a script that starts one process per GPU.
        (1, {}, "torchrun --nproc-per-node"),
        # the two processes that foundry starts would share the GPU
        (1, {"CUDA_VISIBLE_DEVICES": "1", STORE: "somewhere"}, "distributed.nproc_per_node"),
    ],
)
def test_only_visible_gpu_is_used_if_the_user_restricted_visibility(monkeypatch, count, variables, expected):
    place = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in {**place, "MASTER_PORT": "29500", **variables}.items():
        monkeypatch.setenv(name, value)
    FakeGpus(count=count).replace_torchs(monkeypatch)
    gpu = torch.device("cuda")
    if isinstance(expected, str):
        with pytest.raises(ConfigError) as refused:
            _device(detect(), gpu)
        message = f"{expected}: is 2 but this node has 1 GPU; set it to 1, or device=cpu"
        assert str(refused.value) == message
    else:
        assert _device(detect(), gpu) == torch.device("cuda", expected)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux alone says it elsewhere too")
def test_peak_memory_of_a_process_is_in_bytes():
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    _, kibibytes, unit = line.split()
    assert unit == "kB"
    assert peak_memory_bytes(torch.device("cpu")) == pytest.approx(int(kibibytes) * 1024, rel=0.01)


def test_resident_memory_falls_after_a_free_and_peak_memory_does_not():
    before, block = resident_bytes(), mmap(-1, 2**28)  # Closing the mapping returns its memory to the system.
    block.write(bytes(2**28))
    held, peak = resident_bytes(), peak_memory_bytes(torch.device("cpu"))
    block.close()
    assert held > before + 2**27
    assert resident_bytes() < held - 2**27
    assert peak_memory_bytes(torch.device("cpu")) >= peak >= before + 2**27


def test_peak_memory_of_a_run_excludes_the_previous_run(monkeypatch):
    gpus = FakeGpus(peak=60, allocated=0, num_retries=2).replace_torchs(monkeypatch)
    with process_group(Single()) as world:
        assert (peak_memory_bytes(world.device), allocator_retries(world.device)) == (0, 0)
        gpus.peak = 40
        assert peak_memory_bytes(world.device) == 40


def test_free_memory_includes_the_cache_of_this_process_only(monkeypatch):
    FakeGpus(total=100, free=30, allocated=20, reserved=45).replace_torchs(monkeypatch)
    assert free_memory(torch.device("cuda", 0), 8) == 30 + 25
    assert free_memory(torch.device("cpu"), 4) == host_capacity() // 4


AUTO, CUDA, CPU = DeviceKind.auto, DeviceKind.cuda, DeviceKind.cpu
FILES = [Path("/dev/nvidia0"), Path("/dev/nvidia1")]
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version."
)


@pytest.fixture
def machine(monkeypatch):
    """Return a function that fakes driver files, usable GPUs, torch's CUDA version and its initialization error."""

    def make(*, files=(), count=0, cuda="13.0", error=None, visible=None):
        def init():
            raise RuntimeError(error)

        FakeGpus(count=count).replace_torchs(monkeypatch)
        monkeypatch.setattr(device_module, "gpu_files", lambda: list(files))
        monkeypatch.setattr(environment, "gpu_files", lambda: list(files))
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "init", init)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return make


@pytest.mark.parametrize(
    ("properties", "types"),
    [
        ({"files": FILES, "count": 2}, {AUTO: "cuda", CUDA: "cuda", CPU: "cpu"}),
        ({}, {AUTO: "cpu", CPU: "cpu"}),
        ({"visible": "0"}, {AUTO: "cpu", CPU: "cpu"}),  # As set by a script for each process.
        ({"files": FILES, "visible": ""}, {AUTO: "cpu", CPU: "cpu"}),
        ({"files": FILES, "visible": "-1"}, {AUTO: "cpu", CPU: "cpu"}),
        ({"files": FILES, "cuda": None}, {CPU: "cpu"}),
        ({"files": FILES, "error": TOO_OLD}, {CPU: "cpu"}),
    ],
)
def test_device_of_each_kind_or_an_error(machine, properties, types):
    machine(**properties)
    for kind in DeviceKind:
        if kind in types:
            assert choose_device(kind).type == types[kind]
        else:
            with pytest.raises(ConfigError, match=f"^device: is {kind.value} .* device=cpu"):
                choose_device(kind)


def test_gpu_that_torch_cannot_use_is_an_error_with_reason_and_remedy(machine):
    machine(files=FILES, cuda=None)
    with pytest.raises(
        ConfigError, match=r"is auto and .*\(/dev/nvidia0\), .* without CUDA; install .*; or set device=cpu"
    ):
        choose_device()
    machine(files=FILES, error=TOO_OLD)
    with pytest.raises(ConfigError, match=r"too old \(found version 11040\); update the NVIDIA driver, .* device=cpu"):
        choose_device()


def test_nccl_on_the_cpu_is_refused_beside_gpus(machine):
    machine(files=FILES, count=2)
    with (
        pytest.raises(ConfigError, match="is nccl but the run is on the CPU"),
        process_group(Distributed(backend=Backend.nccl), CPU),
    ):
        pass


@pytest.mark.parametrize(("world_size", "text"), [(1, "NVIDIA H100 80GB HBM3"), (8, "NVIDIA H100 80GB HBM3 x 8")])
def test_devices_of_a_run_are_described_by_name_and_number(monkeypatch, world_size, text):
    FakeGpus(count=8).replace_torchs(monkeypatch)
    assert describe_devices(torch.device("cuda", 0), world_size) == text


def test_cpus_of_a_run_are_described_by_their_threads(monkeypatch):
    cpu = torch.device("cpu")
    for threads, world_size, text in (
        (1, 1, "cpu, 1 thread"),
        (4, 1, "cpu, 4 threads"),
        (2, 3, "cpu x 3, 2 threads each"),
    ):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert describe_devices(cpu, world_size) == text


@pytest.mark.parametrize("config", [FSDP(), HSDP(num_replicas=1), DDP(shard_optimizer=True)], ids=lambda c: c.strategy)
def test_gloo_on_gpus_is_refused_if_gradients_are_scattered(machine, monkeypatch, config):
    machine(files=FILES, count=2)
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    config = replace(config, backend=Backend.gloo)
    with pytest.raises(ConfigError, match=r"distributed\.backend: is gloo, .* use nccl"), process_group(config):
        pass


VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF", "CUBLAS_WORKSPACE_CONFIG")


@pytest.mark.parametrize(
    ("kind", "set_before", "expected"),
    [
        (AUTO, {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        (CPU, {}, {}),
        (CUDA, {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "PYTORCH_ALLOC_CONF": "backend:native"}, {}),
        (AUTO, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
        (AUTO, {"PYTORCH_HIP_ALLOC_CONF": ""}, {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),
    ],
)
def test_gpu_process_variables_are_set_unless_the_user_set_them(machine, monkeypatch, kind, set_before, expected):
    machine(files=FILES, count=1)
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # Lets monkeypatch restore the variable after the test.
        monkeypatch.delenv(name)
    for name, value in set_before.items():
        monkeypatch.setenv(name, value)
    choose_device(kind)
    assert {name: os.environ[name] for name in VARIABLES if name in os.environ} == {**set_before, **expected}


@pytest.mark.gpu
def test_cuda_variables_take_effect_and_matmul_is_deterministic_later():
    code = """
import torch
from foundry.parallel.determinism import deterministic
from foundry.parallel.device import choose_device
matrix = torch.ones(64, 64, device=choose_device())
matrix @ matrix
with deterministic(True):
    matrix @ matrix
print(torch.cuda.memory._snapshot()["allocator_settings"]["expandable_segments"])
"""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
