"""Mixtures: exact source shares for any number of ranks, microbatch size and resume point."""

import json
import pickle
from collections import Counter
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.config.sources import proportions
from foundry.core.errors import ConfigError
from foundry.data.conversations.chats import chat_files
from foundry.data.corpora.text import text_files
from foundry.data.corpora.token_files import token_files
from foundry.data.dataset import as_dataset
from foundry.data.loader import Loader
from foundry.data.mixture import Interleave, Interleaved, Mixture, MixtureOrder, describe_weights, interleaved
from foundry.tasks.post_training.data.preferences import preference_files
from foundry.tasks.post_training.data.prompts import prompt_files

WEIGHTS = st.lists(
    st.one_of(st.integers(1, 50), st.sampled_from([0.7, 0.3, 1e-3, 1 / 3, 12.5, 1e6])), min_size=2, max_size=6
)
SIZES = (5, 40, 11)
SHARES = (0.5, 0.3, 0.2)


@settings(deadline=None, max_examples=examples(60))
@given(weights=WEIGHTS, start=st.one_of(st.integers(0, 300), st.integers(10**9, 10**12)), length=st.integers(0, 60))
def test_interleave_counts_equal_enumerated_turns(weights, start, length):
    interleave = Interleave(weights)
    turns = Counter(interleave.sources(range(start, start + length)))
    before, after = interleave.counts(start), interleave.counts(start + length)
    assert [after[source] - before[source] for source in range(len(weights))] == [
        turns[source] for source in range(len(weights))
    ]
    assert sum(after) == start + length


@settings(deadline=None, max_examples=examples(60))
@given(weights=WEIGHTS, position=st.one_of(st.integers(0, 1000), st.integers(0, 10**12)))
def test_each_source_deviates_from_its_share_by_a_bounded_count(weights, position):
    shares = [Fraction(str(weight)) for weight in weights]
    for share, count in zip(shares, Interleave(weights).counts(position), strict=True):
        assert abs(count - position * share / sum(shares)) <= Fraction(len(weights) + 1, 2)


def test_decimal_weights_are_met_exactly_over_long_runs():
    assert Interleave([0.7, 0.3]).counts(10) == [7, 3]
    assert Interleave([0.7, 0.3]).counts(10**12) == [7 * 10**11, 3 * 10**11]
    # At position 4 the sources are level, with weight / (2 c + 1) = 7/7 and 3/3; the first one gets the position.
    assert "".join(map(str, Interleave([0.7, 0.3]).sources(range(10)))) == "0100010010"


def mixed(seed=1, fingerprint="f", weights=SHARES, sizes=SIZES):
    return MixtureOrder(Mixture(sizes, weights), fingerprint=fingerprint, seed=seed)


@settings(deadline=None, max_examples=examples(40))
@given(cuts=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_mixture_order_does_not_depend_on_window_boundaries(cuts):
    whole, one, start = mixed().indices(range(sum(cuts))).tolist(), mixed(), 0
    for cut in cuts:
        assert one.indices(range(start, start + cut)).tolist() == whole[start : start + cut]
        start += cut
    assert pickle.loads(pickle.dumps(one)).indices(range(sum(cuts))).tolist() == whole


def test_each_source_is_read_in_its_own_epochs():
    order = mixed().indices(range(400))
    first = 0
    for size, share in zip(SIZES, SHARES, strict=True):
        own = order[(order >= first) & (order < first + size)]
        assert abs(len(own) - 400 * share) <= 2
        for epoch in range(len(own) // size):
            assert sorted(own[epoch * size :][:size]) == list(range(first, first + size))
        first += size


@pytest.mark.parametrize("change", [{"seed": 2}, {"fingerprint": "g"}, {"weights": (0.5, 0.2, 0.3)}])
def test_seed_fingerprint_and_weights_change_the_mixture_order(change):
    assert mixed().indices(range(50)).tolist() != mixed(**change).indices(range(50)).tolist()


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return sum(SIZES)

    def __getitem__(self, index):
        return {"index": torch.tensor(index)}


def windows(loaders, count):
    """Return the (position, index) pairs of the next global batches, ordered by position."""
    found = []
    for _ in range(count):
        pairs = []
        for one in loaders:
            for microbatch in one.next_window().microbatches:
                pairs += zip(microbatch["position"].tolist(), microbatch["index"].tolist(), strict=True)
        found.append(sorted(pairs))
    return found


def loader(**changes):
    options = {
        "dataset": as_dataset(Numbers()),
        "order": mixed(),
        "batch_size_at": lambda samples: 8,
        "per_gpu_batch_size": 8,
    }
    return Loader(**options | changes)


@settings(deadline=None, max_examples=examples(30))
@given(ranks=st.sampled_from([1, 2, 4]), per_gpu=st.sampled_from([1, 2]), before=st.integers(0, 9))
def test_mixture_resumes_from_the_sample_count_on_any_number_of_ranks(ranks, per_gpu, before):
    alone = loader()
    windows([alone], before)
    resumed = [loader(dp_rank=rank, dp_size=ranks, per_gpu_batch_size=per_gpu) for rank in range(ranks)]
    for one in resumed:
        one.load_state_dict({"samples": 8 * before, "skipped": 0, "order": "keyed"})
    assert alone.state_dict() == resumed[0].state_dict()
    assert windows([alone], 5) == windows(resumed, 5)


def test_workers_read_the_same_mixture():
    assert windows([loader(num_workers=2, per_gpu_batch_size=4)], 6) == windows([loader(per_gpu_batch_size=4)], 6)


@settings(deadline=None, max_examples=examples(50))
@given(counts=st.lists(st.integers(0, 30), min_size=1, max_size=5))
def test_interleaved_yields_each_item_once_at_even_distances(counts):
    parts = [[(source, number) for number in range(count)] for source, count in enumerate(counts)]
    found = list(interleaved(parts, counts))
    assert found == list(Interleaved(parts))
    assert sorted(found) == [item for part in parts for item in part]
    for source, count in enumerate(counts):
        assert [item for item in found if item[0] == source] == parts[source]
        for place in range(len(found)):
            had = sum(item[0] == source for item in found[:place])
            assert abs(had - place * count / len(found)) <= (len(counts) + 1) / 2


@pytest.fixture
def files(tmp_path):
    text = [f"alpha {n} beta {n} gamma\n" for n in range(60)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text))
    (tmp_path / "b.txt").write_text("".join(f"OMEGA {n} PSI\n" for n in range(300)))
    np.arange(900, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "b.npy", np.arange(5000, 5400))
    for name, count in (("one", 30), ("two", 12)):
        rows = [
            {"prompt": f"{name} {n}?", "completion": f"{n}.", "chosen": f"{n}.", "rejected": f"{n}!"}
            for n in range(count)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


SETTINGS = {"seed": 0, "vocab_size": 300, "held_out": 0.2}
KINDS = {
    "text": (text_files, ["a.jsonl", "b.txt"], {"seq_len": 8, "tokenizer": None}),
    "tokens": (token_files, ["a.bin", "b.npy"], {"seq_len": 8, "vocab_size": 6000}),
    "chats": (chat_files, ["one.jsonl", "two.jsonl"], {"seq_len": 64, "tokenizer": None}),
    "preferences": (preference_files, ["one.jsonl", "two.jsonl"], {"seq_len": 64, "tokenizer": None}),
    "prompts": (prompt_files, ["one.jsonl", "two.jsonl"], {"seq_len": 64, "tokenizer": None, "max_new_tokens": 8}),
}


def load(files, kind, **changes):
    part, names, options = KINDS[kind]
    paths = {"path": [str(files / name) for name in names]}
    return part(**SETTINGS | options | {"cache_dir": str(files / "cache")} | paths | changes)


def source_of(splits, kind, index):
    """Return the source number of a training sample, inferred from its content."""
    if kind == "prompts":
        return int(splits.train_prompts[index].columns["prompt"].startswith("two"))
    tokens = splits.train[index]["tokens"]
    if kind == "tokens":
        return int(tokens[0] >= 5000)
    said = splits.tokenizer.decode(tokens.flatten().tolist())
    return int("two" in said) if kind in ("chats", "preferences") else int(not any(c.islower() for c in said))


@pytest.mark.parametrize("kind", KINDS)
def test_weighted_sources_are_read_in_their_shares(files, kind):
    splits = load(files, kind, weights=[0.75, 0.25])
    own = [source["train_samples"] for source in splits.notes["sources"]]
    assert splits.mixture == Mixture(tuple(own), (0.75, 0.25))
    assert sum(own) == len(splits.train)
    assert [source["share"] for source in splits.notes["sources"]] == [0.75, 0.25]
    order = splits.order(7).indices(range(100)).tolist()
    assert Counter(source_of(splits, kind, index) for index in order) == {0: 75, 1: 25}
    assert sum(index >= own[0] for index in order) == 25


@pytest.mark.parametrize("kind", KINDS)
def test_without_weights_each_sample_is_read_once_per_epoch(files, kind):
    splits = load(files, kind)
    assert splits.mixture is None
    assert sorted(splits.order(7).indices(range(len(splits.train)))) == list(range(len(splits.train)))
    sources = [source_of(splits, kind, index) for index in range(len(splits.train))]
    assert sources == sorted(sources)
    assert sources.count(0) == splits.notes["sources"][0]["train_samples"]


@pytest.mark.parametrize("kind", KINDS)
def test_first_validation_samples_cover_all_sources(files, kind):
    splits = load(files, kind)
    if kind == "prompts":
        first = {prompt.columns["prompt"].split()[0] for prompt in splits.prompts[:5]}
    elif kind == "tokens":
        first = {bool(splits.validation[index]["tokens"][0] >= 5000) for index in range(5)}
        assert len(splits.validation) == sum(len(part) for part in splits.validation._dataset.parts)
    elif kind == "text":  # b.txt, a single document, contributes its end, in the middle of the split.
        text = splits.tokenizer.decode(splits.validation.tokens.tolist())
        assert text.startswith("alpha")
        assert text.rstrip().endswith("gamma")
        assert "OMEGA" in text
        return
    else:
        first = {
            "two" in splits.tokenizer.decode(splits.validation[index]["tokens"].flatten().tolist())
            for index in range(5)
        }
    assert len(first) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_identity_includes_weights_and_equates_a_path_with_a_list_of_one(files, kind):
    path = str(files / KINDS[kind][1][0])
    one, alone = load(files, kind, path=path).identity(), load(files, kind, path=[path]).identity()
    assert one == alone
    two, other = (load(files, kind, weights=weights).identity() for weights in ([0.7, 0.3], [0.6, 0.4]))
    without = load(files, kind).identity()
    assert len({str(each["content"]) for each in (one, two, other, without)}) == 4
    assert len({str(each["order"]) for each in (one, two, other, without)}) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_proportional_weights_give_the_same_identity_and_order(files, kind):
    one, other = (load(files, kind, weights=weights) for weights in ([0.7, 0.3], [14, 6.0]))
    assert one.identity() == other.identity()
    assert one.order(7).indices(range(200)).tolist() == other.order(7).indices(range(200)).tolist()


@settings(deadline=None, max_examples=examples(60))
@given(weights=WEIGHTS, scale=st.sampled_from([2, 10, 1000, Fraction(1, 10), Fraction(1, 8)]))
def test_mixture_order_depends_on_the_proportions_of_its_weights(weights, scale):
    scaled = [Decimal(str(weight)) * scale.numerator / scale.denominator for weight in weights]
    assert describe_weights(weights) == describe_weights(scaled)
    assert list(Interleave(weights).sources(range(100))) == list(Interleave(scaled).sources(range(100)))


@settings(deadline=None, max_examples=examples(60))
@given(one=WEIGHTS, other=WEIGHTS)
def test_weight_fingerprints_are_equal_exactly_for_equal_proportions(one, other):
    assert (describe_weights(one) == describe_weights(other)) == (proportions(one) == proportions(other))


def test_weights_that_sum_to_one_are_fingerprinted_as_written():
    assert describe_weights([0.7, 0.3]) == describe_weights([7, 3]) == "-[0.7, 0.3]"
    assert describe_weights([1, 2]) == "-[1/3, 2/3]"


def test_validation_path_accepts_several_files(files):
    rows = load(files, "chats", path=str(files / "one.jsonl"), validation_path=[str(files / "two.jsonl")] * 2)
    assert (len(rows.train), len(rows.validation)) == (30, 24)


def test_source_without_a_full_sample_is_refused_by_name(files):
    (files / "short.txt").write_text("brief")
    with pytest.raises(ConfigError, match=r"the training text of .*short\.txt has \d tokens, fewer than the 9"):
        load(files, "text", path=[str(files / "a.jsonl"), str(files / "short.txt")])
    np.arange(4, dtype=np.uint16).tofile(files / "short.bin")
    with pytest.raises(ConfigError, match=r"no file of .*short\.bin has more training tokens than that"):
        load(files, "tokens", path=[str(files / "a.bin"), str(files / "short.bin")])
