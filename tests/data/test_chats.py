"""Conversation files, read as rows of tokens with individual lengths."""

import json
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples

from foundry.config.schemas.data import OnBadRow, TrainOn
from foundry.core.errors import ConfigError
from foundry.data.conversations.chats import chat_files
from foundry.data.loader import Loader
from foundry.data.order import GlobalOrder
from foundry.tasks.post_training.data.preferences import preference_files
from foundry.tasks.post_training.data.prompts import prompt_files

ROWS = [
    {"messages": [{"role": "user", "content": "?" * (n % 7 + 1)}, {"role": "assistant", "content": f"answer {n}"}]}
    for n in range(30)
]


def load(path, read=chat_files, **changes):
    options = {"seed": 0, "seq_len": 64, "vocab_size": 257, "tokenizer": None, "held_out": 0.2}
    options["cache_dir"] = str(Path(path).parent / "cache")
    return read(path=str(path), **options | changes)


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def texts(splits, split):
    """Return each row as text, with untrained tokens as dots."""
    dataset, tokenizer = getattr(splits, split), splits.tokenizer
    found = []
    for index in range(len(dataset)):
        sample = dataset[index]
        whole = [*sample["tokens"].tolist(), int(sample["targets"][-1])]
        learnt = [False, *(sample["targets"] != -100).tolist()]
        symbols = [tokenizer.decode([token], skip_special_tokens=False) for token in whole]
        found.append("".join(s if is_learnt else "." * len(s) for s, is_learnt in zip(symbols, learnt, strict=True)))
    return found


def test_chat_loss_mask_is_exact_to_the_byte(tmp_path):
    rows = [
        {"messages": [{"role": "system", "content": "S"}, *ROWS[0]["messages"]]},
        {"messages": [*ROWS[1]["messages"], *ROWS[2]["messages"]]},
    ]
    splits = load(write(tmp_path / "a.jsonl", rows), validation_path=str(write(tmp_path / "v.jsonl", ROWS[:1])))
    prompts = ["system: S\nuser: ?\nassistant: ", "user: ??\nassistant: ", "user: ???\nassistant: "]
    dots = ["." * len(prompt) for prompt in prompts]
    end = "<|endoftext|>"
    two = f"{dots[1]}answer 1{end}{dots[2]}answer 2{end}"
    assert texts(splits, "train") == [f"{dots[0]}answer 0{end}", two]
    last = load(
        tmp_path / "a.jsonl", validation_path=str(tmp_path / "v.jsonl"), train_on=TrainOn.last, chat_template="plain"
    )
    assert texts(last, "train")[1] == "." * (len(two) - len("answer 2") - len(end)) + f"answer 2{end}"


def test_all_chat_row_formats_give_the_same_samples(tmp_path):
    pairs = [{"prompt": m["messages"][0]["content"], "completion": m["messages"][1]["content"]} for m in ROWS]
    lists = [{"prompt": m["messages"][:1], "completion": m["messages"][1:]} for m in ROWS]
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    pq.write_table(pa.Table.from_pylist(pairs), tmp_path / "pairs.parquet")
    (tmp_path / "list.json").write_text(json.dumps(ROWS))
    write(tmp_path / "rows.jsonl", ROWS)
    write(tmp_path / "pairs.jsonl", pairs)
    write(tmp_path / "lists.jsonl", lists)
    names = ["rows.jsonl", "rows.parquet", "pairs.parquet", "list.json", "pairs.jsonl", "lists.jsonl"]
    found = [load(tmp_path / name) for name in names]
    for splits in found[1:]:
        assert texts(splits, "train") == texts(found[0], "train")
        assert texts(splits, "validation") == texts(found[0], "validation")
    assert (len(found[0].train), len(found[0].validation)) == (24, 6)


def test_chat_batch_is_padded_to_its_longest_row(tmp_path):
    dataset = load(write(tmp_path / "rows.jsonl", ROWS)).train
    batch = dataset.batch([3, 0, 5])
    lengths = [len(dataset[index]["tokens"]) for index in (3, 0, 5)]
    assert batch["tokens"].shape == batch["targets"].shape == (3, max(lengths))
    for row, index in enumerate((3, 0, 5)):
        for name, value in dataset[index].items():
            assert torch.equal(batch[name][row, : lengths[row]], value)
        assert bool((batch["targets"][row, lengths[row] :] == -100).all())
    assert dataset.num_tokens([3, 0, 5]) == sum(lengths)
    assert len(dataset[dataset.longest]["tokens"]) == max(dataset.lengths)


@pytest.mark.parametrize("world_size", [1, 2])
def test_window_token_count_is_global_and_excludes_padding(tmp_path, world_size):
    dataset = load(write(tmp_path / "rows.jsonl", ROWS)).train
    order = GlobalOrder(num_samples=len(dataset), fingerprint="x", seed=1)
    loaders = [
        Loader(
            dataset=dataset,
            order=order,
            batch_size_at=lambda samples: 8,
            per_gpu_batch_size=2,
            dp_rank=rank,
            dp_size=world_size,
            tokens_per_sample=999,
        )
        for rank in range(world_size)
    ]
    for start in (0, 8, 16, 24):
        windows = [loader.next_window() for loader in loaders]
        expected = sum(len(dataset[int(i)]["tokens"]) for i in order.indices(range(start, start + 8)))
        assert [window.num_tokens for window in windows] == [expected] * world_size


def test_chat_notes_report_rows_lengths_and_trained_share(tmp_path):
    splits = load(write(tmp_path / "rows.jsonl", [*ROWS, {"messages": []}]), on_bad_row=OnBadRow.skip)
    notes = splits.notes
    assert notes["skipped_rows"] == {"no assistant turn": 1}
    assert notes["rows"] == 30 == notes["train_rows"] + notes["validation_rows"]
    both = [len(part[i]["tokens"]) + 1 for part in (splits.train, splits.validation) for i in range(len(part))]
    assert notes["row_tokens"]["max"] == max(both)
    assert notes["row_tokens"]["p50"] == sorted(both)[14]
    learnt = sum(
        int((part[i]["targets"] != -100).sum()) for part in (splits.train, splits.validation) for i in range(len(part))
    )
    assert notes["trained_share"] == pytest.approx(learnt / sum(both))
    assert json.loads(json.dumps(notes)) == notes


def test_validation_prompts_carry_their_reference_answers(tmp_path):
    rows = [*ROWS, {"messages": [*ROWS[1]["messages"], *ROWS[2]["messages"]]}]
    splits = load(write(tmp_path / "rows.jsonl", ROWS), validation_path=str(write(tmp_path / "v.jsonl", rows[-2:])))
    first, second = splits.prompts
    assert splits.tokenizer.decode(list(first.tokens)) == "user: ??\nassistant: "
    assert first.answer == "answer 29"
    assert splits.tokenizer.decode(list(second.tokens), skip_special_tokens=False).endswith("user: ???\nassistant: ")
    assert (second.answer, second.row) == ("answer 2", 1)
    assert splits.stop_ids == (splits.tokenizer.token_to_id("<|endoftext|>"),)


def test_identity_depends_on_content_and_not_on_file_names(tmp_path):
    (tmp_path / "other").mkdir()
    one = load(write(tmp_path / "rows.jsonl", ROWS)).identity()
    moved = load(write(tmp_path / "other" / "b.jsonl", ROWS)).identity()
    assert {**one, "order": None} == {**moved, "order": None}
    for changes in ({"seq_len": 60}, {"train_on": TrainOn.last}, {"held_out": 0.3}):
        assert load(tmp_path / "rows.jsonl", **changes).identity()["content"] != one["content"]
    write(tmp_path / "rows.jsonl", [*ROWS[1:], ROWS[0]])
    assert load(tmp_path / "rows.jsonl").identity()["content"] != one["content"]


def turns(*contents):
    return {"messages": [{"role": r, "content": c} for r, c in zip(("user", "assistant") * 2, contents, strict=False)]}


def weighted(**keys):
    """Return a row with two answers; the first answer has `keys` in addition."""
    messages = [*turns("a", "b")["messages"], *turns("c", "d")["messages"]]
    return {"messages": [messages[0], {**messages[1], **keys}, *messages[2:]]}


BAD = {
    "no JSON": ('{"messages": [', "is not JSON", "cannot be read"),
    "no object": ("[1, 2]", "holds list, not an object", "cannot be read"),
    "no columns": ({"text": "a"}, "neither messages nor prompt and completion (its columns: text)", "without a conv"),
    "no completion": ({"prompt": "a", "completion": None}, "neither messages nor completion", "without a conv"),
    "no list": ({"messages": "a"}, "has str as messages, not a list", "wrong type"),
    "no message": ({"messages": [3]}, "has int as message 1, not an object", "wrong type"),
    "no role": ({"messages": [{"content": "a"}]}, "has no role in message 1", "wrong type"),
    "content": ({"messages": [{"role": "user", "content": ["a"]}]}, "has list as content in message 1", "wrong type"),
    "completion": ({"prompt": "a", "completion": 3}, "has int as completion", "wrong type"),
    "half a pair": (turns("a", "\ud800"), "an unpaired surrogate in message 2", "wrong type"),
    "no answer": (
        {"messages": ROWS[0]["messages"][:1]},
        "has no assistant turn (its roles: user)",
        "no assistant turn",
    ),
    "empty": ({"messages": []}, "has no assistant turn (its roles: none)", "no assistant turn"),
    "empty answer": (turns("a", " \n"), "has an empty answer", "empty answer"),
    "an empty answer first": (turns("a", "", "b", "c"), "has an empty answer", "empty answer"),
    "tools": ({**turns("a", "b"), "tools": [{"name": "f"}]}, "has tools, but the chat template", "with tools"),
    "weight": (weighted(weight=0), "has weight=0 in an answer, but all answers have equal weight", "with weight in an"),
    "train": (weighted(train=False), "has train=False in an answer", "with train in an answer"),
    "too long": (turns("a", "b" * 64), "more than data.seq_len=64", "longer than seq_len"),
}


@settings(max_examples=examples(40), deadline=None)
@given(
    bad=st.lists(st.tuples(st.sampled_from(sorted(BAD)), st.integers(0, 30)), min_size=1, max_size=9),
)
def test_bad_chat_rows_are_reported_by_file_and_line_or_skipped(bad):
    lines = [json.dumps(row) for row in ROWS]
    of_kind = {kind: row if isinstance(row, str) else json.dumps(row) for kind, (row, _, _) in BAD.items()}
    for kind, place in bad:
        lines.insert(place, of_kind[kind])
    kinds = [(number, kind) for number, line in enumerate(lines, 1) for kind, text in of_kind.items() if line == text]
    with TemporaryDirectory() as folder:
        path = write(Path(folder) / "rows.jsonl", lines)
        valid = write(Path(folder) / "valid.jsonl", ROWS[:2])
        with pytest.raises(ConfigError) as refused:
            load(path, validation_path=str(valid))
        *first, last = [str(violation) for violation in refused.value.violations]
        assert len(first) == min(5, len(kinds))
        for said, (number, kind) in zip(first, kinds, strict=False):
            assert said.startswith(f"data.path: {path}:{number} ")
            assert BAD[kind][1] in said
            assert "\n" not in said
        assert last.startswith(f"data.path: {len(kinds)} of {len(lines) + 2} rows cannot be used (")
        assert last.endswith("correct them, or set data.on_bad_row=skip")
        skipped = load(path, validation_path=str(valid), on_bad_row=OnBadRow.skip)
        assert texts(skipped, "train") == texts(load(write(path, ROWS), validation_path=str(valid)), "train")
        counts = skipped.notes["skipped_rows"]
        assert sum(counts.values()) == len(kinds)
        assert all(sum(count for name, count in counts.items() if name.startswith(BAD[kind][2])) for _, kind in kinds)


TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize(
    ("columns", "kind"),
    [
        ({"tools": TOOLS}, "with tools"),
        ({"tools": json.dumps(TOOLS)}, "with tools"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "with chat_template_kwargs"),
        ({"documents": [{"title": "a"}]}, None),
        ({"tools": None, "documents": None}, None),
        ({"tools": []}, None),
        ({"tools": "[]"}, None),
        ({"topic": "a"}, None),
    ],
)
def test_row_with_template_variables_is_refused(tmp_path, form, columns, kind):
    path, rows = tmp_path / f"rows.{form}", [*ROWS[:6], {**ROWS[6], **columns}]
    if form == "parquet":
        pq.write_table(pa.Table.from_pylist([{**dict.fromkeys(columns), **row} for row in rows]), path)
    else:
        write(path, rows)
    if kind is None:
        assert load(path).notes["rows"] == 7
        return
    with pytest.raises(
        ConfigError, match=rf"{path}:7 has {kind.removeprefix('with ')}, but the chat template receives only"
    ):
        load(path)
    assert load(path, on_bad_row=OnBadRow.skip).notes["skipped_rows"] == {kind: 1}


def test_documents_are_refused_if_the_template_renders_them(tmp_path):
    source = "{% for message in messages %}{{ message['role'] + ': ' + message['content'] }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(source + "{% if documents %}{{ documents }}{% endif %}")
    path = write(tmp_path / "rows.jsonl", [*ROWS[:6], {**ROWS[6], "documents": [{"title": "a"}]}])
    with pytest.raises(ConfigError, match=r"rows\.jsonl:7 has documents, but"):
        load(path, chat_template=str(tmp_path / "own.jinja"))


@pytest.mark.parametrize("name", ["weight", "train", "training", "train_detail"])
@pytest.mark.parametrize(
    ("value", "is_alike"),
    [(1, True), (1.0, True), (True, True), (None, True), (0, False), (0.5, False), (2, False), (False, False)],
)  # fmt: skip
def test_trained_answer_with_a_weight_other_than_one_is_refused(tmp_path, name, value, is_alike):
    path = write(tmp_path / "rows.jsonl", [*ROWS[:6], weighted(**{name: value})])
    options = {"held_out": 0.1, "on_bad_row": OnBadRow.skip}
    assert load(path, **options).notes["skipped_rows"] == ({} if is_alike else {f"with {name} in an answer": 1})
    assert load(path, **options, train_on=TrainOn.last).notes["skipped_rows"] == {}


@pytest.mark.parametrize(
    ("read", "row"),
    [
        (preference_files, {"prompt": "a", "chosen": "b", "rejected": "c"}),
        (partial(prompt_files, max_new_tokens=4), {"prompt": "a", "answer": "b"}),
    ],
)
def test_preference_and_prompt_rows_with_tools_are_refused(tmp_path, read, row):
    path = write(tmp_path / "rows.jsonl", [*[row] * 6, {**row, "tools": TOOLS}])
    with pytest.raises(ConfigError, match=rf"{path}:7 has tools, but the chat template receives only messages"):
        load(path, read=read)


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([], "no rows"),
        (ROWS[:1], "one row"),
        ([{"messages": []}] * 4, "has no usable row for training"),
    ],
)
def test_too_few_chat_rows_are_a_config_error(tmp_path, rows, named):
    with pytest.raises(ConfigError, match=named):
        load(write(tmp_path / "rows.jsonl", rows), on_bad_row=OnBadRow.skip)


def test_parquet_without_conversation_columns_is_refused(tmp_path):
    pq.write_table(pa.table({"text": ["a", "b"]}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"needs one of the columns messages, prompt, completion; it has text"):
        load(tmp_path / "rows.parquet")
