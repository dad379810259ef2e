import pytest
import torch
from torch import nn

from foundry.config.schemas.precision import Precision, PrecisionMode
from foundry.parallel.precision import LossScaler, PrecisionPolicy, fp32_arithmetic

CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))


@pytest.mark.parametrize(
    ("mode", "held", "computed"),
    [
        ("fp32", torch.float32, torch.float32),
        ("amp_bfloat16", torch.float32, torch.bfloat16),
        ("amp_float16", torch.float32, torch.float16),
        ("pure_bf16", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_mode_sets_weight_and_compute_dtypes(mode, held, computed):
    policy = PrecisionPolicy.from_config(Precision(mode=PrecisionMode(mode)), torch.device("cpu"))
    prepared = policy.prepare(model())
    with policy.autocast(CPU):
        # pure_bf16 accepts fp32 inputs and casts them.
        result = prepared(torch.ones(2, 4))
        product = prepared[0](torch.ones(2, 4, dtype=held))
    assert prepared[0].weight.dtype is held
    assert product.dtype is computed
    assert result.isfinite().all()
    assert (policy.scaler(CPU) is not None) == (mode == "amp_float16")


@pytest.mark.parametrize("mode", PrecisionMode)
def test_backward_pass_of_an_amp_window_runs_in_the_calling_thread(mode):
    """If it ran in another thread, that thread's first autocast context would clear the cache of rounded weights."""
    policy, is_amp = PrecisionPolicy(mode), mode.value.startswith("amp")
    is_threaded = torch._C._is_multithreading_enabled
    with policy.window(torch.device("cuda")):
        assert is_threaded() == (not is_amp)
    assert is_threaded()


def test_pure_bf16_casts_keyword_arguments_but_no_integers():
    seen = {}

    class Probe(nn.Module):
        def forward(self, tokens, *, noise):
            seen.update(tokens=tokens.dtype, noise=noise.dtype)
            return noise

    PrecisionPolicy(PrecisionMode.pure_bf16).prepare(Probe())(torch.arange(3), noise=torch.rand(3))
    assert seen == {"tokens": torch.int64, "noise": torch.bfloat16}


def test_scaled_steps_equal_unscaled_steps():
    plain, scaled = model(), model()
    scaler = LossScaler(CPU, init_scale=2.0**10)
    for network in (plain, scaled):
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            loss = network(torch.arange(8.0).view(2, 4)).square().mul(torch.arange(4.0)).sum()
            if network is plain:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                assert scaler.step(optimizer)
                scaler.update()
    for ours, theirs in zip(scaled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_loss_scale_halves_on_nan_and_resumes_from_its_state():
    network = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scaler = LossScaler(CPU, init_scale=8.0, growth_interval=2)

    def step(scaler, value):
        for parameter in network.parameters():
            parameter.grad = torch.full_like(parameter, value)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    before = network.weight.clone()
    assert step(scaler, float("nan")) == 4.0
    assert torch.equal(network.weight, before)
    assert step(scaler, 1.0) == 4.0
    continued = LossScaler(CPU, growth_interval=2)
    continued.load_state_dict(scaler.state_dict())
    assert scaler.state_dict() == {"scale": 4.0, "good_steps": 1}
    assert step(continued, 1.0) == step(scaler, 1.0) == 8.0


def test_unscale_sets_found_inf_and_divides_gradients():
    network = nn.Linear(2, 1)
    scaler = LossScaler(CPU, init_scale=4.0)
    network.weight.grad = torch.tensor([[4.0, float("inf")]])
    scaler.unscale_(torch.optim.SGD(network.parameters(), lr=0.1))
    assert scaler.found_inf == torch.ones(())
    assert network.weight.grad[0, 0] == 1.0


@pytest.mark.parametrize("bad", [0, 1])
def test_overflow_in_one_optimizer_skips_both(bad):
    networks = [nn.Linear(2, 1), nn.Linear(2, 1)]
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1) for network in networks]
    scaler = LossScaler(CPU, init_scale=4.0)
    for index, network in enumerate(networks):
        for parameter in network.parameters():
            parameter.grad = torch.full_like(parameter, float("inf") if index == bad else 1.0)
    for optimizer in optimizers:
        scaler.unscale_(optimizer)
    assert [scaler.step(optimizer) for optimizer in optimizers] == [False, False]
    scaler.update()
    assert scaler.get_scale() == 2.0


def switches():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_setting_covers_products_and_convolutions_in_the_body_only(tf32):
    before = switches()
    with fp32_arithmetic(tf32=tf32):
        assert switches() == (tf32, tf32)
    assert switches() == before
    with pytest.raises(RuntimeError, match="a failed run"), fp32_arithmetic(tf32=not tf32):
        raise RuntimeError("a failed run")
    assert switches() == before


@pytest.mark.gpu
@pytest.mark.parametrize("operation", [torch.mm, torch.nn.functional.conv1d], ids=["product", "convolution"])
def test_fp32_on_a_gpu_is_exact_unless_tf32_is_allowed(operation):
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((256, 512), (512, 256)) if operation is torch.mm else ((8, 512, 64), (256, 512, 3))
    arguments = [torch.randn(shape, device="cuda", generator=generator) for shape in shapes]
    exact = operation(*(each.double() for each in arguments))
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("a GPU before Ampere has no TF32")
    errors = {}
    for tf32 in (False, True):
        with fp32_arithmetic(tf32=tf32):
            errors[tf32] = float((operation(*arguments) - exact).abs().max() / exact.abs().max())
    assert errors[False] < 1e-5 < errors[True] < 1e-2
