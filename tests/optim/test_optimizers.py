import math

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from support.composition import EQUAL_RATES, configure
from support.examples import examples, long_case
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from foundry.config.record.frozen import plain
from foundry.config.record.resume_compat import differences
from foundry.core.errors import ConfigError
from foundry.models.fsdp_block import FSDPBlock
from foundry.optim.muon import Muon, orthogonalise
from foundry.optim.optimizers import adam, adamw, muon, param_groups, sgd
from foundry.parts.optimization import build_optimizers
from foundry.training.step import set_schedule

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
# None of these values is a default.
ADAM = {"lr": 1e-2, "beta1": 0.8, "beta2": 0.97, "eps": 1e-6, "weight_decay": 0.1}
MUON = {**ADAM, "momentum": 0.8, "nesterov": False, "ns_steps": 4}
SGD = {"lr": 1e-2, "momentum": 0.7, "nesterov": True, "weight_decay": 0.1}


class Block(FSDPBlock):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    """A model with every kind of parameter: embedding, matrices and vectors in blocks, scalar, frozen matrix."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 6)
        self.blocks = nn.Sequential(Block(), Block())
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 12)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.blocks(self.frozen(self.embedding(tokens)))) * self.scale


def names_in(model, optimizer, group=None):
    groups = optimizer.param_groups if group is None else [optimizer.param_groups[group]]
    held = {p for g in groups for p in g["params"]}
    return {name for name, p in model.named_parameters() if p in held}


def train(model, optimizers, steps=4):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(12, (8, 5), generator=generator)
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return dict(model.named_parameters())


def assert_same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


@pytest.mark.parametrize(("make", "options"), [(adamw, ADAM), (adam, ADAM), (sgd, SGD), (muon, MUON)])
def test_every_trainable_parameter_is_in_one_group(make, options):
    model = Model()
    held = [
        p for optimizer in make(model=model, **options) for group in optimizer.param_groups for p in group["params"]
    ]
    assert len(held) == len(set(held))
    assert set(held) == {p for p in model.parameters() if p.requires_grad}


def test_vectors_have_no_weight_decay():
    model = Model()
    groups = param_groups(model, 0.1)
    assert [(group["weight_decay"], group["wd_mult"], group["lr_mult"]) for group in groups] == [(0.1, 1, 1), (0, 0, 1)]
    assert all(p.ndim >= 2 for p in groups[0]["params"])
    assert all(p.ndim < 2 for p in groups[1]["params"])
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    (optimizer,) = adamw(model=model, **ADAM)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 1 - 1e-2 * 0.1 if p.ndim >= 2 and p.requires_grad else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)


def test_model_without_vectors_has_one_parameter_group():
    assert len(param_groups(nn.Linear(3, 3, bias=False), 0.1)) == 1


@pytest.mark.parametrize(
    ("make", "options", "theirs", "their_options"),
    [
        (adamw, ADAM, torch.optim.AdamW, {"lr": 1e-2, "betas": (0.8, 0.97), "eps": 1e-6}),
        (adam, ADAM, torch.optim.Adam, {"lr": 1e-2, "betas": (0.8, 0.97), "eps": 1e-6}),
        (sgd, SGD, torch.optim.SGD, {"lr": 1e-2, "momentum": 0.7, "nesterov": True}),
    ],
    ids=["adamw", "adam", "sgd"],
)
def test_optimizer_updates_match_torch(make, options, theirs, their_options):
    ours, reference = Model(), Model()
    trainable = [p for p in reference.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    weights = train(ours, make(model=ours, **options))
    for name, expected in train(reference, [theirs(groups, **their_options)]).items():
        torch.testing.assert_close(weights[name], expected, atol=1e-7, rtol=1e-6)


def test_muon_updates_block_matrices_only():
    model = Model()
    first, second = muon(model=model, **MUON)
    assert type(first) is Muon
    assert isinstance(second, torch.optim.AdamW)
    assert names_in(model, first) == {f"blocks.{i}.{name}.weight" for i in (0, 1) for name in ("up", "down")}
    assert names_in(model, second, 0) == {"embedding.weight", "head.weight"}
    vectors = {f"blocks.{i}.{name}" for i in (0, 1) for name in ("norm.weight", "norm.bias", "up.bias")}
    assert names_in(model, second, 1) == {"scale", "head.bias"} | vectors


def test_muon_passes_settings_to_both_optimizers():
    matrices, rest = muon(model=Model(), **MUON)
    (adam_only,) = adamw(model=Model(), **ADAM)
    assert {name: matrices.defaults[name] for name in ("momentum", "nesterov", "ns_steps", "weight_decay")} == {
        name: MUON[name] for name in ("momentum", "nesterov", "ns_steps", "weight_decay")
    }
    assert rest.defaults == adam_only.defaults


class WithoutBlocks(nn.Sequential):
    """Language model without repeated blocks."""

    def __init__(self):
        super().__init__(nn.Embedding(12, 6), nn.Linear(6, 12))


def test_muon_without_blocks_is_adamw():
    ours, theirs = WithoutBlocks(), WithoutBlocks()
    theirs.load_state_dict(ours.state_dict())
    (only,) = muon(model=ours, **MUON)
    (expected,) = adamw(model=theirs, **ADAM)
    assert type(only) is type(expected)
    assert only.defaults == expected.defaults
    assert_same(train(ours, [only]), train(theirs, [expected]))


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_on_one_process_matches_torch_bit_for_bit(nesterov):
    ours, theirs = Model(), Model()
    options = {"lr": 3e-2, "momentum": 0.9, "nesterov": nesterov, "ns_steps": 5, "weight_decay": 0.1}
    reference = torch.optim.Muon(
        [p for n, p in theirs.named_parameters() if "blocks" in n and p.ndim == 2],
        adjust_lr_fn="match_rms_adamw",
        **options,
    )
    options["ns_dtype"] = torch.bfloat16
    matrices = [p for n, p in ours.named_parameters() if "blocks" in n and p.ndim == 2]
    assert_same(train(ours, [Muon(matrices, **options)]), train(theirs, [reference]))


@DTYPES
def test_muon_skips_the_update_if_found_inf(dtype):
    model = Model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    options = {"lr": 1.0, "momentum": 0.9, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1}
    optimizer = Muon([model.blocks[0].up.weight], **options, ns_dtype=dtype)
    model.blocks[0].up.weight.grad = torch.full((10, 6), math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert_same(dict(model.named_parameters()), before)
    velocity = optimizer.state[model.blocks[0].up.weight]["momentum_buffer"]
    assert torch.equal(velocity, torch.zeros_like(velocity))
    model.blocks[0].up.weight.grad = torch.ones(10, 6)
    optimizer.found_inf = torch.zeros(())
    optimizer.step()
    assert not torch.equal(model.blocks[0].up.weight, before["blocks.0.up.weight"])


@DTYPES
@pytest.mark.parametrize("shape", [(12, 12), (8, 20), (20, 8)])
def test_newton_schulz_brings_singular_values_near_one(shape, dtype):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * 7
    values = torch.linalg.svdvals(orthogonalise(matrix, 6, dtype).float())
    assert values.min() > 0.5
    assert values.max() < 1.3
    assert torch.equal(orthogonalise(torch.zeros(shape), 5, dtype), torch.zeros(shape, dtype=dtype))


@st.composite
def matrices(draw):
    """Draw a matrix (random, low-rank, ill-conditioned, orthogonal or zero; any scale) and a copy with small noise."""
    rows, columns = draw(st.sampled_from([(1, 1), (1, 48), (48, 1), (2, 64), (7, 5), (24, 24), (32, 96), (64, 16)]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    left, right = (torch.randn(n, n, generator=generator, dtype=torch.float64) for n in (rows, columns))
    left, right = torch.linalg.qr(left)[0], torch.linalg.qr(right)[0]
    rank = min(rows, columns)
    values = {
        "random": torch.rand(rank, generator=generator),
        "low rank": torch.arange(rank) < max(1, rank // 8),
        "ill-conditioned": torch.logspace(0, -12, rank),
        "orthogonal": torch.ones(rank),
        "zero": torch.zeros(rank),
    }[draw(st.sampled_from(["random", "low rank", "ill-conditioned", "orthogonal", "zero"]))]
    scale = draw(st.sampled_from([1e-4, 1.0, 1e4]))
    matrix = scale * (left[:, :rank] * values.double()) @ right[:rank]
    noise = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    return matrix, matrix + 1e-7 * matrix.norm() * noise / noise.norm()


@settings(derandomize=True, max_examples=examples(150), deadline=None)
@given(matrices())
def test_fp32_newton_schulz_does_not_amplify_rounding_errors(pair):
    one, other = (orthogonalise(matrix.float(), 5, torch.float32) for matrix in pair)
    assert torch.isfinite(one).all()
    assert torch.isfinite(other).all()
    assert (one - other).norm() <= 1e-4 * one.norm()
    if not pair[0].any():
        assert not one.any()


@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("fp32", torch.float32),
        ("amp_bfloat16", torch.bfloat16),
        long_case("pure_bf16", torch.bfloat16),
        long_case("amp_float16", torch.float32),
    ],
)
def test_ns_dtype_follows_precision_unless_set(mode, dtype):
    def dtype_of(*overrides):
        config = configure("optimizer=muon", *EQUAL_RATES, f"precision={mode}", *overrides)
        return build_optimizers(config, Model())[0].param_groups[0]["ns_dtype"]

    assert dtype_of() == dtype_of("optimizer.ns_dtype=null") == dtype
    assert dtype_of("optimizer.ns_dtype=fp32") == torch.float32
    assert dtype_of("optimizer.ns_dtype=bf16") == torch.bfloat16


@pytest.mark.parametrize(("word", "refused"), [("null", []), ("bf16", ["optimizer.ns_dtype"])])
def test_ns_dtype_cannot_change_on_resume(word, refused):
    was, now = (plain(configure("optimizer=muon", *overrides)) for overrides in ([], [f"optimizer.ns_dtype={word}"]))
    del was["optimizer"]["ns_dtype"]  # As in a checkpoint written before the field existed.
    found = [difference.key for difference in differences(was, now) if not difference.is_allowed]
    assert found == refused


def test_unsupported_ns_dtype_is_refused():
    with pytest.raises(ConfigError, match=r"optimizer\.ns_dtype.*fp32, bf16"):
        configure("optimizer=muon", "optimizer.ns_dtype=fp16")


def test_schedule_sets_lr_and_weight_decay_of_every_group():
    model = Model()
    optimizers = muon(model=model, **MUON)
    optimizers[1].param_groups[0]["lr_mult"] = 0.5
    set_schedule(optimizers, 0.25)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    assert [group["lr"] for group in groups] == [0.25, 0.125, 0.25]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    set_schedule(optimizers, 0.25, 0.3)
    assert [group["weight_decay"] for group in groups] == [0.3, 0.3, 0.0]


class WithHead(Model):
    def output_head(self):
        return self.head


@pytest.mark.parametrize(("make", "options"), [(adamw, ADAM), (adam, ADAM), (sgd, SGD), (muon, MUON)])
def test_embeddings_and_head_groups_have_their_own_multipliers(make, options):
    model = WithHead()
    groups = {"embeddings": {"lr_mult": 0.1, "wd_mult": 0.0}, "head": {"lr_mult": 0.5}, "patterns": {}}
    optimizers = make(model=model, groups=groups, **options)
    set_schedule(optimizers, 1.0, 0.3)
    rates = {
        name: (held["lr"], held["weight_decay"])
        for optimizer in optimizers
        for held in optimizer.param_groups
        for name, p in model.named_parameters()
        if any(p is other for other in held["params"])
    }
    assert len(rates) == len([p for p in model.parameters() if p.requires_grad])
    assert rates["embedding.weight"] == (0.1, 0.0)
    assert (rates["head.weight"], rates["head.bias"]) == ((0.5, 0.3), (0.5, 0.0))
    assert (rates["blocks.0.up.weight"], rates["blocks.0.norm.weight"]) == ((1.0, 0.3), (1.0, 0.0))


DECAYS = {
    "embeddings": {"beta1": 0.0},
    "head": {"beta2": 0.6},
    "patterns": {"norms": {"match": r"norm\.weight$", "beta1": 0, "beta2": 0.5}},
}
"""Groups that set decays of the moments."""


def decays_of(name):
    """Return the decays of a parameter of `WithHead` with the groups of DECAYS and the settings of ADAM."""
    if name == "embedding.weight":
        return 0.0, 0.97
    if name.startswith("head."):
        return 0.8, 0.6
    return (0.0, 0.5) if name.endswith("norm.weight") else (0.8, 0.97)


@pytest.mark.parametrize(
    ("make", "theirs"), [(adamw, torch.optim.AdamW), (adam, torch.optim.Adam)], ids=["adamw", "adam"]
)
def test_groups_with_their_own_decays_of_moments_match_torch(make, theirs):
    ours, reference = WithHead(), WithHead()
    groups = [
        {"params": [p], "betas": decays_of(name), "weight_decay": 0.1 if p.ndim >= 2 else 0.0}
        for name, p in reference.named_parameters()
        if p.requires_grad
    ]
    weights = train(ours, make(model=ours, groups=DECAYS, **ADAM))
    for name, expected in train(reference, [theirs(groups, lr=1e-2, eps=1e-6)]).items():
        torch.testing.assert_close(weights[name], expected, atol=1e-7, rtol=1e-6)


def test_decays_of_groups_apply_to_adamw_beside_muon():
    model = WithHead()
    orthogonal, others = muon(model=model, groups=DECAYS, **MUON)
    names = {p: name for name, p in model.named_parameters()}
    assert all(group["betas"] == decays_of(names[p]) for group in others.param_groups for p in group["params"])
    assert not any("betas" in group for group in orthogonal.param_groups)


@pytest.mark.parametrize("beta", ["beta1", "beta2"])
def test_decay_of_a_moment_of_a_matrix_that_muon_updates_is_refused(beta):
    groups = {"patterns": {"first": {"match": r"blocks\.0", beta: 0.5}}}
    message = rf"patterns\.first\.{beta}: is 0.5 but the group holds blocks\.0\.up\.weight, which AdamW does not update"
    with pytest.raises(ConfigError, match=message):
        muon(model=Model(), groups=groups, **MUON)


def test_pattern_group_gives_vectors_weight_decay():
    groups = param_groups(Model(), 0.1, {"patterns": {"norms": {"match": r"norm\.weight$", "wd_mult": 2.0}}})
    held = {(g["lr_mult"], g["wd_mult"]): (len(g["params"]), g["weight_decay"]) for g in groups}
    assert held[(1.0, 2.0)] == (2, 0.2)


def test_pattern_group_matches_names_without_the_ddp_prefix():
    groups = {"patterns": {"first": {"match": "^embedding", "lr_mult": 2.0}}}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        held = param_groups(DistributedDataParallel(Model()), 0.1, groups)
    finally:
        dist.destroy_process_group()
    assert [len(g["params"]) for g in held if g["lr_mult"] == 2.0] == [1]


def test_neutral_embeddings_and_head_groups_are_omitted():
    neutral = {"lr_mult": 1.0, "wd_mult": None, "beta1": None, "beta2": None}
    assert len(param_groups(Model(), 0.1, {"embeddings": neutral, "head": neutral, "patterns": {}})) == 2


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"patterns": {"mine": {"match": "nothing"}}}, "patterns.mine: is given but no trainable parameter matches"),
        ({"patterns": {"mine": {"match": "frozen"}}}, "patterns.mine: is given but no trainable parameter matches"),
        ({"head": {"lr_mult": 0.5}}, "optimizer.groups.head: is given but the model has no separate head"),
        (
            {"embeddings": {"lr_mult": 0.5}, "patterns": {"mine": {"match": "embedding"}}},
            "optimizer.groups.patterns.mine: and embeddings both hold embedding.weight",
        ),
    ],
)
def test_invalid_parameter_groups_are_refused(groups, message):
    with pytest.raises(ConfigError, match=message):
        param_groups(Model(), 0.1, groups)
