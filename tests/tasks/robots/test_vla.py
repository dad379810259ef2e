"""Vision-language-action policy: image and instruction inputs, trained parameters and precision."""

import pytest
import torch
from torch import nn

from foundry.config.schemas.precision import PrecisionMode
from foundry.models.fsdp_block import find_blocks
from foundry.models.vlm import PrefixVLM
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World
from foundry.parallel.wrap import parallelize
from foundry.tasks.robots.action_chunks import ActionRegression, DiffusionPolicy, FlowPolicy
from foundry.tasks.robots.models.vla import VLA

BATCH, HORIZON, ACTION_DIM, STATE_DIM, WORDS = 5, 6, 3, 4, 7
BACKBONE = {
    "image_size": 16,
    "num_images": 2,
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_seq_len": 12,
}
CHUNK = {"horizon": HORIZON, "action_dim": ACTION_DIM, "action_steps": 2}
OBJECTIVES = [FlowPolicy(seed=5, **CHUNK), DiffusionPolicy(seed=5, **CHUNK), ActionRegression(**CHUNK)]
ALONE = World.single(torch.device("cpu"))


def fresh(*, state_scale: float = 0.3, **changes) -> VLA:
    sizes = {"state_dim": STATE_DIM, "action_dim": ACTION_DIM, "num_observations": 2, "horizon": HORIZON}
    return VLA(backbone=PrefixVLM(**{**BACKBONE, **changes}), **sizes, intermediate_size=40, state_scale=state_scale)


def policy(**changes) -> VLA:
    """Return a small model with random weights everywhere, since some are initialized to zero."""
    torch.manual_seed(0)
    model = fresh(**changes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def microbatch(count: int = BATCH):
    """Return a batch whose row i has an instruction of i + 1 tokens."""
    draw = torch.Generator().manual_seed(1)
    words = torch.randint(50, (BATCH, WORDS), generator=draw)
    batch = {
        "actions": torch.rand(BATCH, HORIZON, ACTION_DIM, generator=draw) * 2 - 1,
        "state": torch.randn(BATCH, 2, STATE_DIM, generator=draw),
        "images": torch.randint(256, (BATCH, 2, 3, 16, 16), dtype=torch.uint8, generator=draw),
        "instruction": words.masked_fill(torch.arange(WORDS) > torch.arange(BATCH)[:, None], -1),
        "is_padded": torch.arange(HORIZON) >= HORIZON - torch.arange(BATCH)[:, None],
        "position": torch.arange(BATCH) + 100,
    }
    return {name: value[:count].clone() for name, value in batch.items()}


def ask(model, batch, **changed):
    seen = {name: batch[name] for name in ("actions", "state", "images", "instruction")} | changed
    return model(seen.pop("actions"), torch.arange(len(batch["state"])) * 10.5, **seen)


@torch.no_grad()
def test_vla_actions_of_a_row_do_not_depend_on_the_batch():
    model, batch = policy().eval(), microbatch()
    answers = ask(model, batch)
    assert (answers.shape, answers.dtype) == ((BATCH, HORIZON, ACTION_DIM), torch.float32)
    for row in range(BATCH):
        alone = {name: value[row : row + 1] for name, value in batch.items()}
        told = alone["instruction"][:, : row + 1]  # Without padding.
        given = {"state": alone["state"], "images": alone["images"], "instruction": told}
        prediction = model(alone["actions"], torch.tensor([row * 10.5]), **given)
        torch.testing.assert_close(prediction[0], answers[row], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_padding_of_the_instruction_is_ignored():
    model, batch = policy().eval(), microbatch()
    longer = torch.cat((batch["instruction"], torch.full((BATCH, 5), -1)), dim=1)
    torch.testing.assert_close(ask(model, batch, instruction=longer), ask(model, batch), rtol=1e-4, atol=1e-5)
    other = batch["instruction"].masked_fill(batch["instruction"] < 0, -7)
    assert torch.equal(ask(model, batch, instruction=other), ask(model, batch))


@torch.no_grad()
@pytest.mark.parametrize("name", ["actions", "state", "images", "instruction"])
def test_vla_depends_on_each_of_its_inputs(name):
    model, batch = policy().eval(), microbatch()
    changed = batch[name].clone()
    changed[:, -1:] = changed[:, -1:] // 2 if name == "images" else changed[:, -1:] + 0.5
    if name == "instruction":
        changed = torch.where(batch[name] >= 0, (batch[name] + 1) % 50, -1)
    differences = (ask(model, batch, **{name: changed}) - ask(model, batch)).abs().amax(dim=(1, 2))
    assert (differences > 1e-4).all()


@torch.no_grad()
def test_vla_state_is_multiplied_by_its_scale():
    batch = microbatch()
    expected = ask(policy(state_scale=0.3).eval(), batch, state=2 * batch["state"])
    torch.testing.assert_close(ask(policy(state_scale=0.6).eval(), batch), expected)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_vla_freezes_exactly_the_parameters_without_influence(qk_norm):
    model, batch = policy(qk_norm=qk_norm, residual_scalars=qk_norm), microbatch()
    ask(model, batch).square().sum().backward()
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    last = "backbone.model.layers.2"
    unread = ["self_attn.q_proj", "self_attn.o_proj", "post_attention_layernorm", *(f"mlp.{n}_proj" for n in GATES)]
    unread += ["self_attn.q_norm"] * qk_norm
    assert frozen == {"backbone.model.norm.weight", *(f"{last}.{name}.weight" for name in unread)}
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert [name for name, grad in grads.items() if grad is None or not grad.abs().sum() > 0] == []
    untied = policy(tie_embeddings=False)
    assert not untied.backbone.lm_head.weight.requires_grad


GATES = ("gate", "up", "down")


def test_new_vla_outputs_zero():
    assert not ask(fresh(), microbatch()).any()


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda one: type(one).__name__)
def test_vla_trains_and_acts_with_every_policy_objective(objective):
    model, batch = policy(), microbatch()
    whole = objective.loss(model, batch).loss
    whole.backward()
    parts, cut = [], policy()
    for row in range(BATCH):
        part = objective.loss(cut, {name: value[row : row + 1] for name, value in batch.items()}).loss
        part.backward()
        parts.append(part.detach())
    torch.testing.assert_close(sum(parts), whole.detach(), rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(cut.get_parameter(name).grad, parameter.grad, rtol=1e-3, atol=1e-4)
    model.eval()
    looked, observation = [], {name: batch[name] for name in ("state", "images", "instruction")}
    model.backbone.stem.register_forward_hook(lambda *_: looked.append(1))
    answers = objective.act(model, observation, torch.arange(BATCH))
    assert (answers.shape, len(looked)) == ((BATCH, HORIZON, ACTION_DIM), 1)
    assert torch.equal(objective.act(Unobserving(model), observation, torch.arange(BATCH)), answers)


class Unobserving(nn.Module):
    """A policy that encodes the observation in every forward pass."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *given, instruction):
        return self.model(*given, instruction=instruction)


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointed_vla_blocks_give_the_same_gradients(selective):
    plain, batch = policy(), microbatch()
    objective, fp32 = OBJECTIVES[0], PrecisionPolicy(PrecisionMode.fp32)
    parallel = parallelize(
        policy(), fp32, ALONE, grad_checkpointing=True, torchcompile=False, selective_checkpointing=selective
    )
    for model in (plain, parallel.model):
        objective.loss(model, batch).loss.backward()
    for name, parameter in plain.named_parameters():
        grad = parallel.model.get_parameter(name).grad
        assert (grad is None) if parameter.grad is None else torch.equal(grad, parameter.grad), name


def test_vla_blocks_are_those_of_backbone_and_expert():
    model = policy()
    assert list(find_blocks(model)) == [*model.backbone.model.layers, *model.blocks]
    assert model.output_head() is model.action_head


def test_vla_init_weights_fills_a_model_from_the_meta_device():
    with torch.device("meta"):
        model = fresh()
    model.to_empty(device="cpu")
    model.init_weights(seed=3)
    other = fresh()
    other.init_weights(seed=3)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name)), name


@pytest.mark.parametrize("mode", [PrecisionMode.amp_bfloat16, PrecisionMode.pure_bf16])
def test_vla_computes_in_bf16(mode):
    precision = PrecisionPolicy(mode)
    model, batch = precision.prepare(policy()), microbatch()
    with precision.autocast(torch.device("cpu")):
        prediction = ask(model, batch)
    assert prediction.dtype == torch.float32
    torch.testing.assert_close(prediction, ask(policy(), batch), rtol=0.3, atol=0.3)


def test_vla_flops_roughly_agree_with_the_flop_counter_of_torch():
    from torch.utils.flop_counter import FlopCounterMode

    model, batch = policy(), microbatch()
    with FlopCounterMode(display=False) as counter:
        ask(model, batch, instruction=torch.zeros((BATCH, 12), dtype=torch.int64)).sum().backward()
    # Pixels have no gradient, and the counter misses most of attention on a CPU.
    assert counter.get_total_flops() / BATCH == pytest.approx(model.flops_per_sample(), rel=0.15)
