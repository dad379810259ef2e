from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from support.devices import FakeGpus
from support.examples import some_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from foundry.config.build import build
from foundry.config.schemas.distributed import DDP, FSDP, HSDP, GradientSync, Single, resolve_distributed
from foundry.config.schemas.precision import PrecisionMode
from foundry.core.errors import ConfigError, Violation
from foundry.models.fsdp_block import find_blocks
from foundry.models.lora import frozen_matrices
from foundry.parallel import checkpointing
from foundry.parallel.checkpointing import is_saved
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World, arrange
from foundry.parallel.wrap import parallelize
from foundry.planning import fits
from foundry.planning.fake import build_adapted, build_fake
from foundry.planning.fits import check_fits, check_gradient_sync, usable_memory
from foundry.planning.memory import checkpoint_bytes, estimate_memory

LLAMA_70B = [
    "model.vocab_size=128256",
    "model.hidden_size=8192",
    "model.intermediate_size=28672",
    "model.num_layers=80",
    "model.num_heads=64",
    "model.num_kv_heads=8",
    "model.max_seq_len=8192",
    "hparams.per_gpu_batch_size=1",
    "hparams.global_batch_size=512",
    "hparams.grad_checkpointing=true",
    "optimizer=adamw",
    "distributed=fsdp",
    "model.qk_norm=false",
]
LAST = "distributed.gradient_sync=last"
SMALL = ["model.hidden_size=32", "model.intermediate_size=48", "model.num_layers=2", "optimizer=adamw"]


def microbatch_of(config, *, seq_len=256):
    batch = config.hparams.per_gpu_batch_size
    position = torch.arange(batch)
    if config.hparams.loss_function == "mse":
        return {"images": torch.zeros(batch, 1, 8, 8), "labels": position % 10, "position": position}
    tokens = torch.zeros(batch, seq_len, dtype=torch.int64)
    return {"tokens": tokens, "targets": tokens.clone(), "position": position}


def plan(config, *, world_size=1, microbatch=None, device_type="cuda"):
    fake = build_fake(lambda: build(config.model))
    return estimate_memory(config, fake, world_size=world_size, microbatch=microbatch, device_type=device_type)


class Storages:
    """Counts the bytes of the storages that autograd saves, each once, except storages of `left_out`."""

    def __init__(self, left_out):
        self._left_out = {tensor.untyped_storage().data_ptr() for tensor in left_out}
        self._found = {}

    def add(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._left_out:
            self._found[storage.data_ptr()] = storage
        return tensor

    def __enter__(self):
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self.add, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error):
        self._hooks.__exit__(*error)

    @property
    def num_bytes(self):
        return sum(storage.nbytes() for storage in self._found.values())


def saved_by_forward(config, microbatch, *, grad_checkpointing):
    """Return the bytes that autograd saves in a real forward pass.

    With checkpointing, add the bytes that one block saves beyond its inputs when it is recomputed, and the autocast
    copies of the matrices of all other blocks, which autocast keeps until the window ends.
    """
    world, policy = World.single(torch.device("cpu")), PrecisionPolicy(config.precision.mode)
    torch.manual_seed(0)
    model = policy.prepare(build(config.model))
    block = next(find_blocks(model))
    block_forward, calls = block.forward, []
    block.register_forward_pre_hook(lambda module, *call: calls.append(call), with_kwargs=True)
    model = parallelize(
        model, policy, arrange(world, config.distributed), grad_checkpointing=grad_checkpointing, torchcompile=False
    ).model
    with Storages(model.parameters()) as saved, policy.autocast(world.device):
        build(config.objective).loss(model, microbatch)
    if not grad_checkpointing:
        return saved.num_bytes
    args, kwargs = calls[0]
    inputs = [value for value in tree_leaves(calls[0]) if isinstance(value, torch.Tensor)]
    for tensor in inputs:
        saved.add(tensor)  # torch's checkpoint keeps keyword arguments outside of autograd
    with Storages([*model.parameters(), *inputs]) as recomputed, policy.autocast(world.device):
        block_forward(*args, **kwargs)
    matrices = [sum(p.numel() for p in block.parameters() if p.ndim > 1) for block in find_blocks(model)]
    others = 2 * sum(matrices[1:]) if config.precision.mode is PrecisionMode.amp_bfloat16 else 0
    return saved.num_bytes + recomputed.num_bytes + others


MODELS = [
    ("optimizer=adamw",),
    ("optimizer=adamw", "precision=pure_bf16", "hparams.z_loss_coefficient=1e-3", "model.tie_embeddings=true"),
    ("optimizer=adamw", "model=hf_llama", "precision=fp32"),
    ("hparams=diffusion",),
    ("hparams=diffusion", "precision=amp_bfloat16"),
]
CASES = [(overrides, grad_checkpointing) for overrides in MODELS for grad_checkpointing in (False, True)]
BY_DEFAULT = [(MODELS[0], True), (MODELS[1], False), (MODELS[3], True)]


@pytest.mark.parametrize(
    ("overrides", "grad_checkpointing"),
    [
        pytest.param(*case, marks=() if case in BY_DEFAULT else pytest.mark.long, id=f"{' '.join(case[0])}-{case[1]}")
        for case in CASES
    ],
)
def test_planned_activations_equal_the_bytes_saved_by_autograd(configure, overrides, grad_checkpointing):
    config = configure(*overrides, f"hparams.grad_checkpointing={grad_checkpointing}", "hparams.per_gpu_batch_size=2")
    microbatch = microbatch_of(config, seq_len=48)
    planned = plan(config, microbatch=microbatch, device_type="cpu")
    assert planned.note is None
    expected = saved_by_forward(config, microbatch, grad_checkpointing=grad_checkpointing)
    assert planned.activations_estimated == expected


class Outputs(TorchDispatchMode):
    """Records the outputs of the operators that selective checkpointing saves."""

    def __init__(self):
        super().__init__()
        self.tensors = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        output = operator(*args, **(kwargs or {}))
        if is_saved(operator):
            self.tensors += [value for value in tree_leaves(output) if isinstance(value, torch.Tensor)]
        return output


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer=adamw",),
        pytest.param(("optimizer=adamw", "model=hf_llama", "precision=fp32"), marks=pytest.mark.long),
        pytest.param(("hparams=diffusion", "precision=amp_bfloat16"), marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_planned_activations_of_selective_checkpointing_match_torch(configure, overrides, monkeypatch):
    """Compare with the outputs that torch caches for each block plus the other tensors of one recomputed block."""
    selective = ("hparams.grad_checkpointing=true", "hparams.grad_checkpointing_policy=selective")
    config = configure(*overrides, *selective, "hparams.per_gpu_batch_size=2")
    microbatch, world = microbatch_of(config, seq_len=48), World.single(torch.device("cpu"))
    contexts = []

    def recorded(*args):
        contexts.append(create_selective_checkpoint_contexts(*args))
        return contexts[-1]

    monkeypatch.setattr(checkpointing, "create_selective_checkpoint_contexts", recorded)
    torch.manual_seed(0)
    policy = PrecisionPolicy(config.precision.mode)
    model = policy.prepare(build(config.model))
    block = next(find_blocks(model))
    block_forward, calls = block.forward, []
    block.register_forward_pre_hook(lambda module, *call: calls.append(call), with_kwargs=True)
    options = {"grad_checkpointing": True, "selective_checkpointing": True, "torchcompile": False}
    model = parallelize(model, policy, arrange(world, config.distributed), **options).model
    with Storages(model.parameters()) as saved, policy.autocast(world.device):
        build(config.objective).loss(model, microbatch)
    for tensor in tree_leaves(calls[0]):
        if isinstance(tensor, torch.Tensor):
            saved.add(tensor)
    assert len(contexts) == len(list(find_blocks(model)))
    for caching, _ in contexts:
        for held in tree_leaves([*caching.storage.values()]):
            if hasattr(held, "val"):
                saved.add(held.val)
    inputs = [value for value in tree_leaves(calls[0]) if isinstance(value, torch.Tensor)]
    again = Storages([*model.parameters(), *inputs])
    with again, policy.autocast(world.device), Outputs() as outputs:
        block_forward(*calls[0][0], **calls[0][1])
    left_out = {tensor.untyped_storage().data_ptr() for tensor in outputs.tensors}
    recomputed = sum(storage.nbytes() for pointer, storage in again._found.items() if pointer not in left_out)
    matrices = [sum(p.numel() for p in each.parameters() if p.ndim > 1) for each in find_blocks(model)]
    others = 2 * sum(matrices[1:]) if config.precision.mode is PrecisionMode.amp_bfloat16 else 0
    planned = plan(config, microbatch=microbatch, device_type="cpu")
    without = configure(*overrides, selective[0], "hparams.per_gpu_batch_size=2")
    full = plan(without, microbatch=microbatch, device_type="cpu")
    assert planned.activations_estimated == saved.num_bytes + recomputed + others
    assert full.activations_estimated < planned.activations_estimated


def test_fsdp_plan_has_no_autocast_copies_of_block_matrices(configure):
    """FSDP2 gathers blocks in the compute dtype, so autocast makes no copies of their matrices."""
    config = configure(*SMALL, "hparams.global_batch_size=16")
    microbatch = microbatch_of(config)
    alone = plan(config, microbatch=microbatch).activations_estimated
    sharded = plan(config, world_size=2, microbatch=microbatch).activations_estimated
    matrices = 2 * (4 * 32 * 32 + 3 * 32 * 48)
    assert alone - sharded == 2 * matrices


@pytest.mark.parametrize("world_size", some_of([1, 2], 2))
def test_lora_plan_has_gradients_state_and_ema_of_adapters_only(configure, world_size):
    config = configure(*SMALL, "peft=lora", "hparams.ema_decay=0.9")
    fake = build_fake(partial(build_adapted, config))
    planned = estimate_memory(config, fake, world_size=world_size, microbatch=microbatch_of(config), device_type="cuda")
    with torch.device("cpu"):
        model = build_adapted(config)
    model = PrecisionPolicy(config.precision.mode).prepare(model, frozen_matrices(model))
    held = [p.numel() * p.element_size() for p in model.parameters() if not p.requires_grad]
    trained = [4 * p.numel() for p in model.parameters() if p.requires_grad]
    if world_size == 1:
        assert (planned.frozen_weights, planned.weights) == (sum(held), sum(held) + sum(trained))
    assert planned.frozen_weights < planned.weights < plan(configure(*SMALL), world_size=world_size).weights
    share = sum(trained) / world_size
    assert (planned.gradients, planned.optimizer, planned.ema) == (share, 2 * share, share)
    assert planned.note is None
    assert checkpoint_bytes(config, fake) == 4 * sum(trained)


def test_cpu_offload_moves_planned_bytes_to_the_host(configure):
    config = configure(*SMALL, "distributed=fsdp", "distributed.cpu_offload=true", LAST, "hparams.ema_decay=0.9")
    on_gpu, on_cpu = plan(config), plan(config, device_type="cpu")
    parts = on_gpu.weights + on_gpu.gradients + on_gpu.optimizer + on_gpu.ema
    # Five fp32 values per norm weight of a block, all on the device: two norms of width 32, two of a head (8).
    norms = 2 * (2 * 32 + 2 * 8) * 4 * 5
    assert on_gpu.host > 0
    assert on_cpu.host == 0
    assert on_cpu.total - on_gpu.total == on_gpu.host
    whole_gradients = on_gpu.gradients - sum(p.numel() * 4 for p in build(config.model).parameters())
    assert parts - whole_gradients - norms == on_gpu.host


def test_plan_notes_models_and_optimizers_that_cannot_run_on_fake_tensors(configure):
    class Reading(nn.Linear):
        def forward(self, tokens, targets):
            return super().forward(tokens.float()) if bool((tokens > 0).any()) else tokens

    config = configure(*SMALL)
    fake = build_fake(lambda: Reading(4, 4))
    memory = estimate_memory(
        config, fake, world_size=1, microbatch=microbatch_of(config, seq_len=4), device_type="cuda"
    )
    assert memory.activations_estimated is None
    assert memory.note.startswith("the model cannot run on fake tensors (DataDependentOutputException")
    assert memory.total == 16 * (4 * 4 + 4)

    config = replace(config, optimizer={"_target_": f"{__name__}.adafactor"})
    memory = estimate_memory(config, fake, world_size=1, microbatch=None, device_type="cuda")
    assert memory.optimizer is None
    assert memory.note.startswith("the optimizers cannot step on fake tensors (DataDependentOutputException")
    assert memory.note.endswith("activations are unknown without the shapes of a microbatch")
    assert checkpoint_bytes(config, fake) is None


def adafactor(*, model, lr):
    return [torch.optim.Adafactor(model.parameters(), lr=lr)]


def amsgrad(*, model, lr):
    return [torch.optim.AdamW(model.parameters(), lr=lr, amsgrad=True)]


def refusing(*, model, lr):
    raise ConfigError(Violation("optimizer", "takes other models"))


def test_plan_counts_the_state_of_a_custom_optimizer(configure):
    config = replace(configure(*SMALL), optimizer={"_target_": f"{__name__}.amsgrad"})
    for world_size in (1, 3):
        memory = plan(config, world_size=world_size)
        assert memory.optimizer == 3 * memory.weights


def test_config_error_of_an_optimizer_is_raised_by_the_plan(configure):
    config = replace(configure(*SMALL), optimizer={"_target_": f"{__name__}.refusing"})
    with pytest.raises(ConfigError, match="optimizer: takes other models"):
        plan(config)


def test_checkpoint_holds_weights_averages_and_state(configure):
    words = (*SMALL, "model.tie_embeddings=true")
    parameters = sum(parameter.numel() for parameter in build(configure(*words).model).parameters())

    def size(*overrides):
        config = configure(*words, *overrides)
        return checkpoint_bytes(config, build_fake(lambda: build(config.model)))

    assert size() == parameters * 12
    assert size("hparams.ema_decay=0.9") == parameters * 16
    assert size("precision=pure_bf16", "hparams.ema_decay=0.9") == parameters * 10
    assert size("optimizer=sgd") == parameters * 8


@pytest.mark.long
def test_bf16_moments_halve_planned_optimizer_state(configure):
    wide, narrow = (configure(*SMALL, *more) for more in ([], ["optimizer.moments_dtype=bf16"]))
    assert plan(wide).optimizer == 2 * plan(narrow).optimizer == 2 * plan(wide).weights
    sizes = [checkpoint_bytes(config, build_fake(lambda: build(wide.model))) for config in (wide, narrow)]
    assert sizes[0] - sizes[1] == plan(wide).weights


@pytest.mark.long
def test_estimate_memory_does_not_change_the_fake_model(configure):
    config = configure(*SMALL, "precision=pure_bf16")
    fake = build_fake(lambda: build(config.model))
    before = {name: (id(p), p.dtype) for name, p in fake.model.named_parameters()}
    microbatch = microbatch_of(config, seq_len=8)
    first = estimate_memory(config, fake, world_size=2, microbatch=microbatch, device_type="cuda")
    assert {name: (id(p), p.dtype) for name, p in fake.model.named_parameters()} == before
    assert all(parameter.grad is None for parameter in fake.model.parameters())
    assert first == estimate_memory(config, fake, world_size=2, microbatch=microbatch, device_type="cuda")


@pytest.mark.parametrize(
    ("overrides", "accumulates"),
    [
        (["hparams.global_batch_size=10", "hparams.allow_rounding=true"], False),
        (["hparams.batch_schedule='0:16 400:8'", "hparams.batch_schedule_unit=samples"], True),
    ],
)
def test_planned_gradients_follow_rounded_and_scheduled_batch_sizes(configure, overrides, accumulates):
    words = ("distributed=fsdp", LAST, "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=4")
    memory = plan(configure(*SMALL, *words, "hparams.global_batch_size=8", *overrides), world_size=2)
    assert (memory.gradients > memory.weights) == accumulates


def test_plan_rejects_several_processes_without_a_strategy(configure):
    config = configure(*SMALL, "distributed=none")
    with pytest.raises(ConfigError, match=r"distributed: none is for one process but 2 processes"):
        plan(config, world_size=2)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.long
def test_plan_of_a_70b_model_matches_hand_computed_sizes(configure):
    config = configure(*LLAMA_70B)
    before = resident_bytes()
    memory = plan(config, world_size=256, microbatch=microbatch_of(config, seq_len=8192))
    assert resident_bytes() - before < 1e9
    block = 2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    norms, root = 2 * 80 * 8192, 2 * 128256 * 8192 + 8192
    sharded = (80 * block + root) // 256
    assert sharded * 256 + norms == 70_553_706_496
    assert memory.weights == memory.gradients == 4 * (sharded + norms)
    assert memory.optimizer == 2 * memory.weights
    assert memory.gathered == 4 * root + 2 * 2 * block
    assert memory.reducing == 2 * 4 * root + 4 * root // 256  # as computed, in fp32, and the reduced shard
    assert memory.activations_estimated > 80 * 8192 * 8192 * 2
    assert memory.note is None
    assert memory.total < 60e9
    last = replace(config, distributed=replace(config.distributed, gradient_sync=GradientSync.last))
    summed = plan(last, world_size=256)
    assert summed.gradients == 4 * 70_553_706_496
    assert summed.reducing == 4 * root
    check_gradient_sync(config, memory, world_size=256, capacity=80 * 2**30)
    with pytest.raises(ConfigError, match=r"gradient_sync: is last, .* 262\.8 GiB: .* 80 GiB .*gradient_sync=every"):
        check_gradient_sync(last, summed, world_size=256, capacity=80 * 2**30)


@pytest.mark.parametrize(
    ("overrides", "world_size", "is_refused"),
    [
        (["distributed=fsdp", LAST], 2, True),
        (["distributed=hsdp", "distributed.num_replicas=2", LAST], 4, True),
        (["distributed=ddp", "distributed.shard_optimizer=true"], 2, True),
        (["distributed=fsdp"], 2, False),
        (["distributed=hsdp"], 4, False),
        (["distributed=ddp"], 2, False),
        (["distributed=hsdp", "distributed.num_replicas=2", LAST], 2, False),
        (["distributed=fsdp", LAST, "hparams.global_batch_size=8"], 2, False),
    ],
)
def test_gradient_sync_last_is_rejected_if_gradients_do_not_fit(configure, overrides, world_size, is_refused):
    batch = ["hparams.per_gpu_batch_size=4", "hparams.global_batch_size=32"]
    config = configure(*SMALL, *batch, f"distributed.nproc_per_node={world_size}", *overrides)
    memory = plan(config, world_size=world_size)
    check_gradient_sync(config, memory, world_size=world_size, capacity=memory.total)
    with pytest.raises(ConfigError, match="gradient_sync") if is_refused else nullcontext():
        check_gradient_sync(config, memory, world_size=world_size, capacity=memory.total - 1)


@pytest.mark.parametrize(
    ("distributed", "world_size", "communicators"),
    [(Single(), 1, 0), (DDP(), 8, 1), (FSDP(), 8, 1), (HSDP(), 8, 3), (HSDP(tensor_parallel=2), 8, 4)],
)
def test_usable_memory_leaves_room_for_kernels_and_each_communicator(distributed, world_size, communicators):
    margin = (700 + 688 * communicators) * 2**20
    assert usable_memory(2**36, distributed, world_size, "cuda") == 2**36 - margin
    assert usable_memory(margin - 1, distributed, world_size, "cuda") == 0
    assert usable_memory(margin - 1, distributed, world_size, "cpu") == margin - 1


def test_check_fits_counts_memory_held_by_other_processes(configure, monkeypatch):
    config = configure(*SMALL, "hparams.per_gpu_batch_size=4", "hparams.global_batch_size=32", "distributed=fsdp", LAST)
    world = replace(World(0, 0, 2, 2, torch.device("cuda", 0)), distributed=resolve_distributed(config.distributed, 2))
    memory = plan(config, world_size=2)
    monkeypatch.setattr(fits, "plan_memory", lambda *arguments, **named: memory)
    gpus = FakeGpus(free=memory.total + (700 + 688) * 2**20).replace_torchs(monkeypatch)
    check_fits(config, None, world)
    gpus.free -= 1
    with pytest.raises(ConfigError, match="gradient_sync=every"):
        check_fits(config, None, world)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_options_of_the_decoder_are_counted_whole_and_divided(configure, num_parts):
    options = ["model.residual_scalars=true", "model.value_embeddings=[0,-1]", "model.logit_softcap=30"]
    sizes = [*SMALL, "data.vocab_size=512", "model.num_heads=4", "model.num_kv_heads=2", "precision=fp32"]
    layout = [] if num_parts == 1 else ["distributed=fsdp", f"distributed.tensor_parallel={num_parts}"]
    plans = []
    for added in ([], options):
        config = configure(*sizes, *layout, f"distributed.nproc_per_node={num_parts}", *added)
        plans.append(plan(config, world_size=num_parts, microbatch=microbatch_of(config)))
    plain, memory = plans
    tables, scalars = 2 * 512 * 16 * 4 // num_parts, 4 * (2 + 2 * 2)  # two tables, their factors, and two per block
    assert memory.note is None
    assert memory.weights - plain.weights == memory.gradients - plain.gradients == tables + scalars
    assert memory.optimizer - plain.optimizer == 2 * tables
    assert memory.activations_estimated > plain.activations_estimated
