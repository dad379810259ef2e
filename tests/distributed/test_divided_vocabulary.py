"""Loss over a vocabulary-parallel head, and its communication."""

import pytest
from support.harness import run_ranks

pytestmark = pytest.mark.distributed
TOKENS, HIDDEN, VOCAB = (3, 7), 5, 12


def inputs():
    """Return hidden states, head and targets; some targets are ignored, and two token ids have equal logits."""
    import torch

    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(*TOKENS, HIDDEN, generator=generator), torch.randn(VOCAB, HIDDEN, generator=generator)
    weight[VOCAB - 1] = weight[2]
    targets = torch.randint(VOCAB, TOKENS, generator=generator)
    targets[0, :3], targets[1] = -100, (hidden[1] @ weight.T).argmax(-1)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def divided(weight, world):
    """Return the head as a DTensor sharded by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world.world_size,), mesh_dim_names=("tensor",))
    return distribute_tensor(weight.detach(), mesh, [Shard(0)], src_data_rank=None).requires_grad_()


def made_loss(hidden, head, targets, tile_tokens, softcap=None):
    from foundry.models.token_loss import TokenLoss, project_loss

    options = {"tile_tokens": tile_tokens, "softcap": softcap}
    found = project_loss(hidden, head, targets, TokenLoss(0.3, finds_correct=True), **options)
    return found.loss, [found.loss, found.log_prob, found.logsumexp, found.correct]


def read_off(hidden, head, targets, tile_tokens, softcap=None):
    """Return a loss over all outputs, and the outputs; the entropy is read from logits of the whole vocabulary."""
    from foundry.models.token_log_probs import project_log_probs

    def read(logits, targets):
        return {"entropy": -(logits.softmax(-1) * logits.log_softmax(-1)).sum(-1)}

    found = project_log_probs(hidden, head, targets, tile_tokens=tile_tokens, read=read, softcap=softcap)
    loss = (0.2 * found.logsumexp.square() - found.log_prob + 0.5 * found.read["entropy"]).sum()
    return loss, [loss, found.log_prob, found.logsumexp, found.read["entropy"]]


def returned(hidden, head, targets, tile_tokens, softcap=None):
    from foundry.models.token_log_probs import project_log_probs

    options = {"tile_tokens": tile_tokens, "softcap": softcap}
    found = project_log_probs(hidden, head, targets, return_logits=True, **options)
    loss = found.logits.square().mean() - found.log_prob.sum()
    return loss, [loss, found.log_prob, found.logits]


CASES = [
    (function, tile, softcap)
    for function in (made_loss, read_off, returned)
    for tile in (0, 4)
    for softcap in (None, 1.5)
]


def values(function, head, hidden, targets, *options):
    """Return the outputs of `function`, and the gradients of hidden states and head."""
    loss, found = function(hidden, head, targets, *options)
    loss.backward()
    return [*(tensor.detach().float() for tensor in found), hidden.grad, head.grad]


def on_ranks(world):
    import torch

    for function, *options in CASES:
        hidden, weight, targets = inputs()
        *expected, weight_grad = values(function, weight, hidden, targets, *options)
        hidden = hidden.detach().requires_grad_()
        *found, head_grad = values(function, divided(weight, world), hidden, targets, *options)
        for ours, theirs in zip([*found, head_grad.full_tensor()], [*expected, weight_grad], strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6), (function.__name__, options)


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_vocabulary_parallel_loss_matches_the_whole_vocabulary(world_size):
    run_ranks(on_ranks, world_size)


def sent(world):
    """Return the number of elements of each collective in a loss with gradients."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    numbers = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
            if operator.namespace == "c10d":
                numbers.append(sum(t.numel() for t in tree_leaves(args) if isinstance(t, torch.Tensor)))
            return operator(*args, **(kwargs or {}))

    hidden, weight, targets = inputs()
    head = divided(weight, world)
    with Sizes():
        made_loss(hidden, head, targets, 0)[0].backward()
    return numbers


def test_vocabulary_parallel_loss_sends_no_logits():
    """Ranks send per token: two maxima, an index, two sums, and the gradient of the hidden states."""
    count = TOKENS[0] * TOKENS[1]
    assert run_ranks(sent, 2)[0] == [count, count, count, 2 * count, HIDDEN * count]


def look_up(world):
    import torch

    from foundry.models.tensor_parallel import embed_divided

    _, weight, targets = inputs()
    tokens = targets.clamp(min=0)
    embedding = torch.nn.Embedding(VOCAB, HIDDEN, _weight=weight.detach().clone())
    (expected := embedding(tokens)).square().sum().backward()
    shared = torch.nn.Embedding(VOCAB, HIDDEN)
    shared.weight = torch.nn.Parameter(divided(weight, world))
    (found := embed_divided(shared, tokens)).square().sum().backward()
    assert torch.equal(found, expected)
    assert shared.weight.grad.to_local().shape == (VOCAB // world.world_size, HIDDEN)
    assert torch.allclose(shared.weight.grad.full_tensor(), embedding.weight.grad)


def look_up_features(world):
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    from foundry.models.tensor_parallel import embed_columns

    tokens = inputs()[2].clamp(min=0)
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(VOCAB, 6)
    (expected := embedding(tokens)).square().sum().backward()
    mesh = init_device_mesh("cpu", (world.world_size,), mesh_dim_names=("tensor",))
    weight = distribute_tensor(embedding.weight.detach(), mesh, [Shard(1)], src_data_rank=None)
    shared = torch.nn.Embedding(VOCAB, 6)
    shared.weight = torch.nn.Parameter(weight)
    (found := embed_columns(shared, tokens)).square().sum().backward()
    assert torch.equal(found, expected.chunk(2, -1)[world.rank])
    assert torch.equal(shared.weight.grad.full_tensor(), embedding.weight.grad)


def test_embedding_sharded_by_features_gives_the_features_of_the_rank():
    run_ranks(look_up_features, 2)


def test_vocabulary_parallel_embedding_matches_the_whole_embedding():
    run_ranks(look_up, 2)
