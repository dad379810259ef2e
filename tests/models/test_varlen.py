"""Variable-length attention matches attention with a dense mask; conditions for its kernel."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from support.devices import DEVICES, Operations, device_of, waiting_is_an_error
from support.examples import examples
from support.varlen_kernel import kernel_on_cpu
from torch._subclasses.fake_tensor import FakeTensorMode

from foundry.data.packing import find_bounds
from foundry.models.attention import varlen
from foundry.models.attention.documents import Documents
from foundry.models.attention.varlen import DocumentBounds, has_kernel
from foundry.models.transformer import Transformer
from foundry.objectives.sft import SFT
from foundry.training.step import to_device

CUDA = torch.device("cuda", 0)
VOCAB, CONTEXT = 40, 24


def documents_of(rows):
    """Return document numbers, (rows, longest) int64, for lists of document lengths, padded with -1."""
    widths = [sum(lengths) for lengths in rows]
    found, number = torch.full((len(rows), max(1, *widths)), -1), 0
    for row, lengths in enumerate(rows):
        start = 0
        for length in lengths:
            found[row, start : start + length] = number
            start, number = start + length, number + 1
    return found


ROWS = st.lists(st.lists(st.integers(1, 9), max_size=6), min_size=1, max_size=4)


@given(rows=ROWS)
@settings(max_examples=examples(40), deadline=None)
def test_document_bounds_match_and_have_few_shapes(rows):
    documents = documents_of(rows)
    found = find_bounds(documents)
    starts, longest = found["document_starts"], int(found["longest_document"])
    assert starts.dtype == torch.int32
    runs = [torch.unique_consecutive(row, return_counts=True)[1].tolist() for row in documents]
    lengths = [length for row in runs for length in row]
    assert starts.diff().tolist() == lengths + [0] * (len(starts) - 1 - len(lengths))
    assert (len(starts) - 1).bit_count() == 1
    assert len(starts) - 1 < 2 * len(lengths)
    assert longest % 128 == 0
    assert max(lengths) <= longest < max(lengths) + 128
    assert torch.equal(find_bounds(documents[:, None])["document_starts"], starts)


def bounds_of(documents):
    found = find_bounds(documents)
    return DocumentBounds(found["document_starts"], int(found["longest_document"]))


@given(rows=ROWS, heads=st.sampled_from([(2, 2), (4, 2), (6, 1)]), knows_groups=st.booleans())
@settings(max_examples=examples(40), deadline=None)
def test_varlen_attention_and_gradients_match_the_dense_mask(rows, heads, knows_groups):
    documents = documents_of(rows)
    torch.manual_seed(0)
    shapes = [(len(rows), count, documents.shape[1], 8) for count in (heads[0], heads[1], heads[1])]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    weights = torch.randn(shapes[0], dtype=torch.float64)
    results = []
    with pytest.MonkeyPatch.context() as patch, kernel_on_cpu() as calls:
        patch.setattr(varlen, "_SUPPORTS_GROUPED_HEADS", knows_groups)
        packed = Documents(documents, bounds_of(documents))
        for attended in (
            packed.attend(*leaves),
            F.scaled_dot_product_attention(*leaves, attn_mask=packed.mask, enable_gqa=heads[0] != heads[1]),
        ):
            results.append([attended, *torch.autograd.grad((attended * weights).sum(), leaves)])
    assert len(calls) == 1
    for ours, masked in zip(*results, strict=True):
        torch.testing.assert_close(ours, masked, rtol=1e-9, atol=1e-9)


def make_model(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Transformer(vocab_size=VOCAB, max_seq_len=CONTEXT, init_std=0.3, **sizes, **changes)


def microbatch_of(rows):
    documents = documents_of(rows)
    tokens = torch.randint(0, VOCAB, documents.shape)
    targets = tokens.roll(-1, dims=1).masked_fill(documents < 0, -100)
    positions = torch.arange(int(documents.max()) + 1)
    return {"tokens": tokens, "targets": targets, "documents": documents, "position": positions}


def test_packed_microbatch_uses_one_kernel_per_layer_with_the_same_loss():
    model, objective, plain = make_model(), SFT(), microbatch_of([[7, 1, 9], [20], [3, 3, 3, 3, 3]])
    losses, gradients = [], []
    for added, num_calls in ({}, 0), (find_bounds(plain["documents"]), 2):
        model.zero_grad()
        with kernel_on_cpu() as calls:
            losses.append(objective.loss(model, {**plain, **added}).loss)
        losses[-1].backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        assert len(calls) == num_calls
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    for ours, other in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-5 * float(other.abs().max()))


def test_attention_dropout_uses_the_mask():
    """The kernel does not support dropout keyed by sample."""
    microbatch = microbatch_of([[7, 1, 9]])
    microbatch |= find_bounds(microbatch["documents"])
    with kernel_on_cpu() as calls:
        SFT(attention_dropout=0.2).loss(make_model(attention_dropout=0.2), microbatch)
    assert calls == []


@torch.no_grad()
def test_padded_prompts_are_attended_by_their_bounds():
    """The logits of padded prompts, and of the next token, match the logits of each prompt alone."""
    model = make_model().eval()
    sequences = [torch.randint(0, VOCAB, (length,)) for length in (9, 1, 4, 9)]
    padding = torch.tensor([9 - len(sequence) for sequence in sequences])
    padded = torch.stack([F.pad(sequence, (9 - len(sequence), 0)) for sequence in sequences])
    cache, following = model.new_cache(10, padding), torch.randint(0, VOCAB, (4, 1))
    with kernel_on_cpu() as calls:
        first = model(padded, return_logits=True, cache=cache).logits[:, -1]
        second = model(following, return_logits=True, cache=cache).logits[:, -1]
    assert calls == [(4 * 9, 4, 4)] * 2  # A single token attends through a mask.
    for row, sequence in enumerate(sequences):
        whole = torch.cat((sequence, following[row]))[None]
        expected = model(whole, return_logits=True).logits[0, -2:]
        torch.testing.assert_close(torch.stack((first[row], second[row])), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "capability", "is_built", "expected"),
    [
        (CUDA, torch.bfloat16, 128, (9, 0), True, True),
        (CUDA, torch.float16, 64, (8, 0), True, True),
        (CUDA, torch.float32, 128, (9, 0), True, False),
        (CUDA, torch.bfloat16, 100, (9, 0), True, False),
        (CUDA, torch.bfloat16, 256, (9, 0), True, False),
        (CUDA, torch.bfloat16, 128, (7, 5), True, False),
        (CUDA, torch.bfloat16, 128, (9, 0), False, False),
        (torch.device("cpu"), torch.bfloat16, 128, (9, 0), True, False),
    ],
)
def test_has_kernel_depends_on_device_dtype_and_head_dim(
    monkeypatch, device, dtype, head_dim, capability, is_built, expected
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: is_built)
    varlen._is_supported.cache_clear()
    try:
        assert has_kernel(device, dtype, head_dim) is expected
    finally:
        varlen._is_supported.cache_clear()


def bytes_made(seq_len):
    """Return total and largest bytes of the tensors that attention over 512-token documents makes on a fake GPU."""
    import torch.nn.attention.varlen

    class Sizes(Operations):
        largest = total = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = super().__torch_dispatch__(function, types, args, kwargs)
            for tensor in found if isinstance(found, tuple) else (found,):
                if isinstance(tensor, torch.Tensor):
                    size = tensor.numel() * tensor.element_size()
                    self.total, self.largest = self.total + size, max(self.largest, size)
            return found

    with FakeTensorMode(), Sizes() as sizes:
        query = torch.empty(1, 16, seq_len, 64, dtype=torch.bfloat16, device=CUDA)
        key = torch.empty(1, 4, seq_len, 64, dtype=torch.bfloat16, device=CUDA)
        starts = torch.empty(seq_len // 512 + 1, dtype=torch.int32, device=CUDA)
        attended = DocumentBounds(starts, 512).attend(query, key, key)
    assert attended.shape == query.shape
    assert sizes.names.count("torch_attn::_varlen_attn") == 1
    return sizes.total, sizes.largest


def test_varlen_memory_is_linear_in_the_row_length():
    """Fake tensors compute the sizes without a GPU."""
    (total, largest), (twice, _) = bytes_made(8192), bytes_made(16384)
    assert twice <= 2 * total
    assert largest == 8192 * 16 * 64 * 2  # The size of the queries.


def gpu_model(seq_len, device):
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Transformer(vocab_size=VOCAB, max_seq_len=seq_len, **sizes).to(device_of(device))


@pytest.mark.parametrize("device", DEVICES)
def test_half_precision_packed_loss_matches_the_cpu(device):
    """On a GPU, compare the real kernel, and check that each layer calls it once and that nothing synchronizes."""
    microbatch = microbatch_of([[70, 1, 90], [200], [30, 3, 3, 3, 3]])
    microbatch |= find_bounds(microbatch["documents"])
    expected = SFT().loss(gpu_model(256, "cpu"), microbatch).loss
    model = gpu_model(256, device)
    pinned = {name: tensor.pin_memory() if device == "cuda" else tensor for name, tensor in microbatch.items()}
    for is_first in (True, False):  # Libraries are initialized in the first pass.
        with waiting_is_an_error("cpu" if is_first else device), Operations() as operations:
            with torch.autocast(device, torch.bfloat16):
                loss = SFT().loss(model, to_device(pinned, device_of(device))).loss
            loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-2)
    if device == "cuda":
        assert operations.names.count("torch_attn::_varlen_attn") == len(model.model.layers)
        assert operations.names.count("torch_attn::_varlen_attn_backward") == len(model.model.layers)
        assert not any("scaled_dot_product" in name for name in operations.names)


@pytest.mark.gpu
def test_varlen_gpu_memory_is_linear_in_the_row_length():
    def peak(seq_len):
        model = gpu_model(seq_len, "cuda")
        microbatch = microbatch_of([[512] * (seq_len // 512)])
        on_device = to_device(microbatch | find_bounds(microbatch["documents"]), CUDA)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.autocast("cuda", torch.bfloat16):
            loss = SFT().loss(model, on_device).loss
        loss.backward()
        return torch.cuda.max_memory_allocated() - before

    peak(1024)
    assert peak(16384) < 2.2 * peak(8192)
