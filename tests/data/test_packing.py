"""Sample packing: each sample is packed once, attention stays within it, and the loss equals that of unpacked rows."""

from collections import defaultdict
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from support.composition import compose, configure

from foundry.core.errors import ConfigError
from foundry.data.conversations.examples import Examples
from foundry.data.loader import Loader
from foundry.data.order import GlobalOrder
from foundry.data.packing import find_bounds, first_fit_decreasing
from foundry.models.attention.documents import Documents, isolates_documents
from foundry.models.pretrained.huggingface import HuggingFaceCausalLM
from foundry.models.token_log_probs import read_log_probs
from foundry.models.transformer import Transformer
from foundry.objectives.sft import SFT
from foundry.parts.data import build_data
from foundry.parts.model import resolve_packing
from foundry.parts.optimization import build_budget, build_schedule
from foundry.planning.derive import build_plan
from foundry.planning.report import show
from foundry.tasks.post_training.data.prompts import RowNumbers

VOCAB, CAPACITY, WINDOW = 40, 24, 16
DROPOUT = {"hidden_dropout": 0.3, "attention_dropout": 0.2}
PACKED = ["data=arithmetic", "data.packing=true"]
NO_MEMORY = defaultdict(int, note=None, peak="forward", usable=None)


@given(lengths=st.lists(st.integers(1, CAPACITY), max_size=60))
@settings(max_examples=30, deadline=None)
def test_first_fit_decreasing_packs_each_sample_once_into_few_rows(lengths):
    packs = first_fit_decreasing(np.array(lengths, dtype=np.int64), CAPACITY)
    assert sorted(sample for pack in packs for sample in pack) == list(range(len(lengths)))
    filled = [sum(lengths[sample] for sample in pack) for pack in packs]
    assert all(0 < tokens <= CAPACITY for tokens in filled)
    assert len(packs) < 2 * sum(lengths) / CAPACITY + 1
    assert packs == first_fit_decreasing(np.array(lengths, dtype=np.int64), CAPACITY)


def examples(seed=0, count=40):
    """Return rows of 2 to 20 tokens; every seventh row has no trained tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(3, 22, count)
    offsets = np.concatenate([[0], lengths.cumsum()])
    trained = random.random(offsets[-1]) < 0.5
    for row in range(0, count, 7):
        trained[offsets[row] : offsets[row + 1]] = False
    return Examples(random.integers(0, VOCAB, offsets[-1], dtype=np.uint16), trained, offsets)


def windows(pack_tokens, dp_size=1, per_gpu=4, workers=0):
    """Return the second window of every rank: its microbatches of the second global batch."""
    dataset, found = examples(), []
    order = GlobalOrder(num_samples=len(dataset), fingerprint="x", seed=1)
    for rank in range(dp_size):
        sizes = {"batch_size_at": lambda samples: WINDOW, "per_gpu_batch_size": per_gpu, "num_workers": workers}
        loader = Loader(dataset=dataset, order=order, dp_rank=rank, dp_size=dp_size, pack_tokens=pack_tokens, **sizes)
        loader.next_window()
        found.append(loader.next_window())
    return found


def texts(microbatch):
    """Return the tokens and targets of each sample, keyed by its position."""
    if "documents" not in microbatch:
        rows = zip(microbatch["position"].tolist(), microbatch["tokens"], microbatch["targets"], strict=True)
        return {position: (tokens.tolist(), targets.tolist()) for position, tokens, targets in rows}
    of_sample = [microbatch["documents"] == number for number in range(len(microbatch["position"]))]
    rows = zip(microbatch["position"].tolist(), of_sample, strict=True)
    return {p: (microbatch["tokens"][here].tolist(), microbatch["targets"][here].tolist()) for p, here in rows}


@pytest.mark.parametrize(("dp_size", "per_gpu", "workers"), [(1, 4, 0), (2, 2, 0), (4, 4, 0), (1, 2, 2)])
def test_packed_window_has_the_same_samples_on_any_number_of_ranks(dp_size, per_gpu, workers):
    (plain,) = windows(None)
    packed = windows(CAPACITY, dp_size, per_gpu, workers)
    assert len({len(window.microbatches) for window in packed}) == 1
    assert {window.num_tokens for window in packed} == {plain.num_tokens}
    assert {window.num_samples for window in packed} == {WINDOW}
    found = {}
    for window in packed:
        for microbatch in window.microbatches:
            assert len(microbatch["tokens"]) <= per_gpu
            assert microbatch["tokens"].shape[1] <= CAPACITY
            assert ((microbatch["documents"] == -1) <= (microbatch["targets"] == -100)).all()
            expected = find_bounds(microbatch["documents"])
            assert all(torch.equal(microbatch[name], tensor) for name, tensor in expected.items())
            found |= texts(microbatch)
    for microbatch in plain.microbatches:
        for position, (tokens, targets) in texts(microbatch).items():
            own = found.pop(position)
            assert own == (tokens[: len(own[0])], targets[: len(own[0])])
            assert all(target == -100 for target in targets[len(own[0]) :])
    assert found == {}


def make_model(**changes):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    return Transformer(vocab_size=VOCAB, max_seq_len=CAPACITY, init_std=0.3, **sizes, **changes)


def step(model, objective, window):
    """Return the mean loss, the number of correct tokens and the gradients over all microbatches of all ranks."""
    model.zero_grad()
    parts = [microbatch for of_rank in window for microbatch in of_rank.microbatches]
    count = sum(objective.num_valid(part) for part in parts)
    losses = [objective.loss(model, part) for part in parts]
    loss = sum(part.loss for part in losses) / count
    loss.backward()
    correct = sum(float(part.metrics["accuracy"].sum) for part in losses)
    return float(loss.detach()), correct, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"sft_average_log_probs": True}, {"z_loss_coefficient": 0.1}, DROPOUT])
@pytest.mark.parametrize(("dp_size", "per_gpu"), [(1, 1), (2, 4)])
def test_packed_loss_and_gradients_match_unpacked_rows(options, dp_size, per_gpu):
    model, objective = make_model(**(options if options is DROPOUT else {})), SFT(**options)
    loss, correct, plain = step(model, objective, windows(None))
    other_loss, other_correct, packed = step(model, objective, windows(CAPACITY, dp_size, per_gpu))
    assert other_loss == pytest.approx(loss, rel=1e-6)
    assert other_correct == correct
    for one, other in zip(plain, packed, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_microbatch_without_samples_has_zero_loss_and_gradients():
    empty = {"tokens": torch.zeros(2, 1, dtype=torch.int64), "targets": torch.full((2, 1), -100)}
    empty |= {"documents": torch.full((2, 1), -1), "position": torch.empty(0, dtype=torch.int64)}
    for options in (DROPOUT, {"sft_average_log_probs": True}):
        objective, model = SFT(**options), make_model(**(options if options is DROPOUT else {}))
        assert objective.num_valid(empty) == 0
        loss = objective.loss(model, empty).loss
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert all(float(parameter.grad.abs().sum()) == 0.0 for parameter in model.parameters())


def test_attention_looped_over_documents_matches_the_masked_attention():
    # The mask serves devices on which the loop would synchronize for each document length.
    torch.manual_seed(0)
    documents = Documents(torch.tensor([[0, 0, 0, 1, 2, 2, -1], [3, 3, 3, 3, 3, 3, 3]]))
    assert documents.positions.tolist() == [[0, 1, 2, 0, 0, 1, 0], list(range(7))]
    query, (key, value) = torch.randn(2, 4, 7, 8), torch.randn(2, 2, 2, 7, 8)
    masked = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=documents.mask, enable_gqa=True
    )
    torch.testing.assert_close(documents.attend(query, key, value), masked, rtol=1e-5, atol=1e-6)


class Leaky(torch.nn.Module):
    """A model that accepts `documents` but ignores them."""

    def __init__(self):
        super().__init__()
        self.inner = make_model()

    def forward(self, tokens, targets=None, *, documents=None, **asked):
        return self.inner(tokens, targets, **asked)


class Unaware(torch.nn.Module):
    """A model that does not accept `documents`."""

    def forward(self, tokens, targets=None, *, read=None):
        return read_log_probs(torch.zeros(*tokens.shape, VOCAB), targets, read=read)


def test_packing_is_resolved_by_probing_the_model_for_isolation(caplog):
    config = configure(*PACKED, "objective=sft")
    assert isolates_documents(make_model())
    assert resolve_packing(config.data, make_model()) == config.data.seq_len == 160
    assert resolve_packing(configure("data=arithmetic", "objective=sft").data, Unaware()) is None
    assert resolve_packing(config.data, Leaky()) is None
    assert "data.packing is off: the log-probabilities of the model depend on" in caplog.text
    with pytest.raises(ConfigError) as refused:
        resolve_packing(config.data, Unaware())
    expected = "data.packing: is true but the model is Unaware, whose forward() does not take documents; set it to"
    assert str(refused.value).startswith(expected)


def test_packing_of_data_without_lengths_is_refused():
    order = GlobalOrder(num_samples=4, fingerprint="x", seed=1)
    sizes = {"batch_size_at": lambda samples: 4, "per_gpu_batch_size": 4}
    with pytest.raises(ConfigError, match=r"^data\.packing: is true but RowNumbers has no lengths_of\(\), .* to false"):
        Loader(dataset=RowNumbers(4), order=order, pack_tokens=CAPACITY, **sizes)


@pytest.mark.parametrize(("form", "objective", "rows_each"), [("chats", "sft", 1), ("preferences", "dpo", 2)])
def test_plan_reports_rows_per_step_and_packing_efficiency(form, objective, rows_each, tmp_path):
    sizes = ["data.num_rows=60", "hparams.global_batch_size=16", "hparams.per_gpu_batch_size=16", "hparams.max_steps=4"]
    own = [f"data.form={form}", f"objective={objective}", f"data.cache_dir={tmp_path}"]
    config = configure(*PACKED, *sizes, *own)
    data = build_data(config)
    budget = build_budget(config, data, 1)
    given = config, budget, data, build_schedule(config, budget), torch.nn.Linear(3, 2)
    ranks = {"world_size": 1, "strategy": "single", "device": "cpu"}
    plan = build_plan(*given, **ranks, pack_tokens=160)
    order = GlobalOrder(num_samples=60, fingerprint=data.fingerprint, seed=42)
    reading = {"batch_size_at": lambda samples: 16, "per_gpu_batch_size": 100, "pack_tokens": 160}
    loader = Loader(dataset=data.train, order=order, **reading)
    windows = [loader.next_window() for _ in range(4)]  # The last window reaches the second epoch.
    rows = sum(rows_each * len(part["tokens"]) for window in windows for part in window.microbatches)
    used = sum(window.num_tokens for window in windows)
    expected = {"steps": 4, "row_tokens": 160, "rows_per_step": rows / 4, "efficiency": used / (160 * rows)}
    assert plan["packing"] == expected
    assert 0.7 < plan["packing"]["efficiency"] < 1
    console = Console(file=StringIO(), width=200)
    show({**plan, "checkpoint_bytes": None, "memory": NO_MEMORY}, console)
    assert f"{rows / 4:.4g} of 160 tokens, {expected['efficiency']:.1%} of them useful" in console.file.getvalue()
    assert build_plan(*given, **ranks)["packing"] is None
    answers = (config, budget, replace(data, train=RowNumbers(60)), *given[3:])  # A dataset without known lengths.
    unknown = build_plan(*answers, **ranks, pack_tokens=160)
    assert unknown["packing"] == {"steps": 0, "row_tokens": 160, "rows_per_step": None, "efficiency": None}
    show({**unknown, "checkpoint_bytes": None, "memory": NO_MEMORY}, console)
    assert "of 160 tokens; their number depends on the completions" in console.file.getvalue()


def test_teacher_that_mixes_documents_turns_packing_off(caplog):
    config = configure(*PACKED, "objective=sft")
    assert resolve_packing(config.data, Leaky(), "teacher") is None
    assert "data.packing is off: the log-probabilities of the teacher depend on" in caplog.text


def make_hf(architecture, attention="sdpa"):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    if architecture in ("llama", "qwen3"):
        sizes |= {"num_key_value_heads": 1, "head_dim": 8}
    if architecture == "gpt2":
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return HuggingFaceCausalLM(
        path=None,
        architecture=architecture,
        config={**sizes, "attn_implementation": attention},
        vocab_size=VOCAB,
        max_seq_len=CAPACITY,
        init_std=0.3,
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt2", "gpt_neox"])
def test_transformers_models_isolate_packed_documents(architecture, attention):
    model = make_hf(architecture, attention)
    assert isolates_documents(model)
    loss, correct, plain = step(model, SFT(), windows(None))
    other_loss, other_correct, packed = step(model, SFT(), windows(CAPACITY, 2, 4))
    assert (other_loss, other_correct) == (pytest.approx(loss, rel=1e-6), correct)
    for one, other in zip(plain, packed, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)


def test_recurrent_model_is_found_not_to_isolate_documents():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    recurrent = HuggingFaceCausalLM(
        path=None, architecture="mamba", config=sizes, vocab_size=VOCAB, max_seq_len=CAPACITY
    )
    assert not isolates_documents(recurrent)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["objective=next_token"], "is true but objective NextToken takes one sample per row"),
        (["objective=sft", "hparams.torchcompile=true"], "is true together with hparams.torchcompile"),
        (
            ["data.form=text", "objective=distillation", "objective.teacher={folder}"],
            "is true but each sample of Arithmetic has data.seq_len tokens, which fill a row; set it to false",
        ),
    ],
)
def test_packing_with_unsupported_settings_is_refused(overrides, message, tmp_path):
    (tmp_path / "config.json").write_text("{}")  # The config of a teacher.
    with pytest.raises(ConfigError) as refused:
        compose(*PACKED, *(override.format(folder=tmp_path) for override in overrides))
    assert f"data.packing: {message}" in str(refused.value)
