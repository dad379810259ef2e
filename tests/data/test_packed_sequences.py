"""Best-fit packing of documents into training rows: no token is lost or repeated, and rows start at documents."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.composition import compose, configure
from support.outcome import losses
from support.small_text import RUN, SMALL

from foundry.core.errors import ConfigError
from foundry.data.conversations.examples import IGNORED_TARGET
from foundry.data.corpora.packed_sequences import PackedSequences, best_fit_decreasing, pack_documents
from foundry.data.loader import Loader
from foundry.engine.train import train
from foundry.parts.data import build_data
from foundry.run_dir.checkpoints import find

END = 0
PACKED = "data.packing_strategy=best_fit"
LENGTHS = st.lists(st.integers(0, 40), min_size=1, max_size=40)


def stream(lengths):
    """Join documents of these lengths, with END after each document; all other tokens are different numbers."""
    tokens = iter(range(1, sum(lengths) + 1))
    return np.array([token for n in lengths for token in [*(next(tokens) for _ in range(n)), END]], np.uint16)


@settings(max_examples=60, deadline=None)
@given(lengths=LENGTHS, seq_len=st.integers(1, 24))
def test_packed_rows_read_each_token_once_and_keep_documents_whole(lengths, seq_len):
    tokens = stream(lengths)
    rows = PackedSequences(tokens, seq_len, *pack_documents(tokens, end=END, seq_len=seq_len))
    batch = rows.batch(range(len(rows)))
    targets, inputs = batch["targets"].numpy(), batch["tokens"].numpy()
    is_input = targets != IGNORED_TARGET
    following = dict(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    assert sorted(inputs[is_input]) == sorted(tokens[:-1])
    assert sorted(targets[is_input]) == sorted(tokens[1:])
    assert all(following[a] == b for a, b in zip(inputs[is_input], targets[is_input], strict=True) if a != END)
    assert rows.num_tokens(range(len(rows))) == is_input.sum() == len(tokens) - rows.dropped_tokens == len(tokens) - 1
    assert rows.padding_tokens == (~is_input).sum()

    firsts, sizes = rows.pieces.T
    begins = np.cumsum([0, *(n + 1 for n in lengths[:-1])])
    begin = begins[np.searchsorted(begins, firsts, side="right") - 1]  # of the document of each piece
    assert ((firsts - begin) % seq_len == 0).all(), "pieces start at their document or at a multiple of seq_len in it"
    wholes = {
        int(first) for first, size, at in zip(firsts, sizes, begin, strict=True) if first == at and size < seq_len
    }
    assert {
        int(at) for at, n in zip(begins, lengths, strict=True) if n + 1 < seq_len and at < len(tokens) - 1
    } <= wholes
    for start, stop in zip(rows.bounds[:-1], rows.bounds[1:], strict=True):
        is_beginning = (firsts == begin)[start:stop].tolist()
        assert is_beginning == sorted(is_beginning, reverse=True), "a row with a beginning starts with it"
    filled = sorted(np.add.reduceat(sizes, rows.bounds[:-1]).tolist() if len(rows) else [])
    assert len(filled) < 2 or filled[0] + filled[1] > seq_len, "no two rows fit into one"


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), max_size=50), capacity=st.integers(12, 20))
def test_best_fit_decreasing_chooses_the_fullest_row_with_room(lengths, capacity):
    assigned, room = best_fit_decreasing(np.array(lengths, np.int64), capacity), list[int]()
    for piece in sorted(range(len(lengths)), key=lambda piece: -lengths[piece]):
        row, fitting = assigned[piece], [left for left in room if left >= lengths[piece]]
        if row == len(room):
            assert not fitting
            room.append(capacity)
        else:
            assert room[row] == min(fitting)
        room[row] -= lengths[piece]


@pytest.fixture
def text_words(tmp_path):
    """Overrides for documents that fill most of a row of 16 tokens, and a second source of documents of many rows."""
    for name, lengths in (("short", [5] * 80), ("long", range(100, 110))):
        rows = ({"text": " ".join(f"{name}{i % 7}" for i in range(n))} for n in lengths)
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    paths = f"data.path=[{tmp_path}/short.jsonl,{tmp_path}/long.jsonl]"
    return [*RUN, *SMALL, paths, "data.seq_len=16", f"data.cache_dir={tmp_path}/cache"]


def test_packed_text_counts_padding_and_has_the_same_samples_on_two_ranks(text_words):
    data, wrapped = (build_data(configure(*text_words, *words)) for words in ([PACKED], []))
    notes, rows = data.notes, len(data.train)
    assert notes["padding_train_tokens"] == 16 * rows - (notes["train_tokens"] - notes["dropped_train_tokens"])
    assert notes["dropped_train_tokens"] == 2, "the last target of each source"
    assert data.fingerprint == f"{wrapped.fingerprint}-best_fit"
    assert data.tokens_per_sample == round((notes["train_tokens"] - 2) / rows) < data.max_tokens == 16
    assert "padding_train_tokens" not in wrapped.notes
    assert wrapped.tokens_per_sample == 16

    def read(ranks, skipped=0):
        loaders = [
            Loader(
                dataset=data.train,
                order=data.order(3),
                batch_size_at=lambda samples: 8,
                per_gpu_batch_size=4,
                dp_rank=rank,
                dp_size=ranks,
                tokens_per_sample=data.tokens_per_sample,
            )
            for rank in range(ranks)
        ]
        found = dict[int, list[int]]()
        for loader in loaders:
            loader.load_state_dict({"samples": skipped, "skipped": 0})
            for _ in range((16 - skipped) // 8):
                window = loader.next_window()
                for batch in window.microbatches:
                    found |= dict(zip(batch["position"].tolist(), batch["targets"].tolist(), strict=True))
                last = range(loader.samples - 8, loader.samples)
                assert window.num_tokens == data.train.num_tokens(data.order(3).indices(last).tolist())
        return found

    assert read(1) == read(2)
    assert read(2, skipped=8) == {position: row for position, row in read(1).items() if position >= 8}


def test_packed_run_resumes_bit_for_bit_and_refuses_another_strategy(text_words, tmp_path):
    words = [*text_words, "scheduler.horizon=4", "checkpoint.interval=2"]

    def trained(name, steps, *more):
        run_dir = train(configure(*words, f"hparams.max_steps={steps}", *more), tmp_path / name).run_dir
        return run_dir, (find(run_dir) / "shard-00000.safetensors").read_bytes()

    whole, weights = trained("whole", 4, PACKED)
    trained("halves", 2, PACKED)
    with pytest.raises(ConfigError, match=r"data\.packing_strategy"):
        trained("halves", 4)
    halves, resumed = trained("halves", 4, PACKED)
    assert resumed == weights
    assert losses(halves) == losses(whole)


def test_best_fit_packing_of_token_files_requires_a_tokenizer():
    tokens = ["data=tokens", "data.path=a.bin", PACKED]
    with pytest.raises(ConfigError, match=r"data\.packing_strategy.* is best_fit .* set data\.tokenizer"):
        compose(*tokens)
