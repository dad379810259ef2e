import pytest
import torch
from support.devices import FakeGpus

from foundry.config.schemas.precision import PrecisionMode
from foundry.training.throughput import Throughput, peak_flops

BF16, FP16, FP32 = PrecisionMode.amp_bfloat16, PrecisionMode.amp_float16, PrecisionMode.fp32


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H200 NVL", 835.5),
        ("NVIDIA H20", 148.0),
        ("NVIDIA H20-3e", 148.0),
        ("NVIDIA GH200 480GB", 989.4),
        ("NVIDIA GH200 144G HBM3e", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA B300 SXM6 AC", 2250.0),
        ("NVIDIA GB300", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A100 80GB PCIe", 312.0),
        ("A100-PCIE-40GB", 312.0),
        ("NVIDIA A10", 125.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA A40", 149.7),
        ("NVIDIA L4", 121.0),
        ("NVIDIA L40", 181.05),
        ("NVIDIA L40S", 362.05),
        ("NVIDIA RTX A6000", 154.8),
        ("NVIDIA RTX 6000 Ada Generation", 364.2),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 503.8),
        ("NVIDIA GeForce RTX 3090", 71.2),
        ("NVIDIA GeForce RTX 3090 Ti", 80.0),
        ("NVIDIA GeForce RTX 4080", 97.5),
        ("NVIDIA GeForce RTX 5080", 112.6),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("AMD Instinct MI300X", 1307.4),
        ("AMD Instinct MI325X", 1307.4),
        ("AMD Instinct MI355X", 2516.6),
        ("AMD Instinct MI250X", 191.5),
    ],
)
def test_peak_flops_of_known_devices(name, tflops):
    assert peak_flops(name, BF16) == pytest.approx(tflops * 1e12)
    assert peak_flops(name, PrecisionMode.pure_bf16) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "Quadro GP100",
        "NVIDIA H2000",
        "NVIDIA A1000",
        "NVIDIA RTX A4000",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4080 SUPER",
        "NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        "Quadro RTX 6000",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA T400",
        "AMD Instinct MI300A",
    ],
)
def test_unknown_device_has_no_peak_flops(name):
    assert peak_flops(name, BF16) is None


def test_peak_flops_depend_on_precision_and_tf32():
    assert peak_flops("Tesla V100-SXM2-16GB", BF16) is None
    assert peak_flops("Tesla V100-SXM2-16GB", FP16) == pytest.approx(125e12)
    assert peak_flops("Tesla T4", BF16) is None
    assert peak_flops("Tesla T4", FP32) == pytest.approx(8.1e12)
    assert peak_flops("NVIDIA H200", FP32) == pytest.approx(66.9e12)
    assert peak_flops("NVIDIA H200", FP32, tf32=True) == pytest.approx(494.7e12)
    assert peak_flops("NVIDIA H200", BF16, tf32=True) == pytest.approx(989.4e12)
    assert peak_flops("Tesla T4", FP32, tf32=True) == pytest.approx(8.1e12)
    assert peak_flops("AMD Instinct MI300X", FP32, tf32=True) is None


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make(clock, **changes):
    arguments = {"world_size": 2, "device": torch.device("cpu"), "precision": BF16, "clock": clock} | changes
    return Throughput(**arguments)


def test_throughput_is_measured_since_the_last_log():
    clock = Clock()
    throughput = make(clock, flops_per_sample=4e12, tokens_per_sample=128)
    throughput.start(step=10, samples=80, tokens=10_240)
    clock.now += 4.0
    rates = throughput.log(step=12, samples=96, tokens=12_288)
    assert rates.step_seconds == pytest.approx(2.0)
    assert rates.samples_per_second == pytest.approx(4.0)
    assert rates.tokens_per_second == pytest.approx(512.0)
    assert rates.tflops == pytest.approx(4.0 * 4.0 / 2)
    assert rates.mfu is None
    clock.now += 1.0
    assert throughput.log(step=13, samples=104).samples_per_second == pytest.approx(8.0)


def test_paused_time_is_not_training_time():
    clock = Clock()
    throughput = make(clock)
    throughput.start(0, 0)
    clock.now += 1.0
    with throughput.pause():
        clock.now += 50.0
    clock.now += 1.0
    evaluation = throughput.pause()
    evaluation.__enter__()
    clock.now += 7.0
    evaluation.__exit__(None, None, None)
    rates = throughput.log(step=4, samples=32)
    assert rates.step_seconds == pytest.approx(0.5)
    assert rates.samples_per_second == pytest.approx(16.0)
    clock.now += 3.0
    assert throughput.log(step=5, samples=40).step_seconds == pytest.approx(3.0)


def test_pause_does_not_wait_for_the_gpu_after_an_error(monkeypatch):
    gpus = FakeGpus().replace_torchs(monkeypatch)
    throughput = make(Clock(), device=torch.device("cuda", 0))
    with throughput.pause():
        assert gpus.num_waits == 1
    assert gpus.num_waits == 2
    with pytest.raises(OSError, match="disk"), throughput.pause():
        raise OSError("disk")
    assert gpus.num_waits == 3  # Before the body, but not after the error.


def test_unknown_rates_are_none():
    clock = Clock()
    throughput = make(clock)
    clock.now += 1.0
    rates = throughput.log(step=1, samples=8)
    assert (rates.tokens_per_second, rates.tflops, rates.mfu) == (None, None, None)
    assert (rates.reserved_memory_bytes, rates.allocator_retries) == (None, None)  # Unknown on a CPU.


def test_mfu_is_the_fraction_of_the_device_peak(monkeypatch):
    FakeGpus(name="NVIDIA H200", peak=123, reserved=150, num_retries=2).replace_torchs(monkeypatch)
    clock = Clock()
    throughput = make(clock, device=torch.device("cuda", 0), world_size=1, flops_per_sample=98.94e12)
    clock.now += 1.0
    rates = throughput.log(step=1, samples=4)
    assert rates.mfu == pytest.approx(0.4)
    assert rates.tflops == pytest.approx(395.76)
    assert (rates.peak_memory_bytes, rates.reserved_memory_bytes, rates.allocator_retries) == (123, 150, 2)


@pytest.mark.gpu
def test_peak_memory_is_measured_on_a_gpu():
    device = torch.device("cuda")
    throughput = make(Clock(), device=device, world_size=1, flops_per_sample=1e9)
    torch.zeros(1024, 1024, device=device)
    assert throughput.log(step=1, samples=1).peak_memory_bytes >= 4 * 2**20


def test_flops_follow_the_tokens_consumed():
    clock = Clock()
    throughput = make(clock, flops_per_sample=4e12, tokens_per_sample=128)
    throughput.start(step=0, samples=0, tokens=0)
    clock.now += 4.0
    half = throughput.log(step=1, samples=16, tokens=16 * 64)
    clock.now += 4.0
    assert throughput.log(step=2, samples=32, tokens=16 * 64 + 16 * 128).tflops == pytest.approx(2 * half.tflops)
