"""Preference files, read as pairs of rows that share a prompt."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from foundry.config.schemas.data import ArithmeticForm, OnBadRow
from foundry.core.errors import ConfigError
from foundry.data.arithmetic import Sum, arithmetic
from foundry.tasks.post_training.data.preferences import preference_files

END = "<|endoftext|>"
ROWS = [{"prompt": "?" * (n % 7 + 1), "chosen": f"yes {n}", "rejected": "no" * (n % 3 + 1)} for n in range(20)]


def load(path, **changes):
    options = {"seed": 0, "seq_len": 64, "vocab_size": 257, "tokenizer": None, "held_out": 0.2}
    options["cache_dir"] = str(Path(path).parent / "cache")
    return preference_files(path=str(path), **options | changes)


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def texts(splits, split="train"):
    """Return both rows of each pair as text, with untrained tokens as dots, except at the start and end."""
    found = []
    for index in range(len(dataset := getattr(splits, split))):
        sample = dataset[index]
        last = (sample["targets"] != -100).sum(-1)
        assert sample["tokens"].shape == sample["targets"].shape
        pair = []
        for tokens, targets in zip(sample["tokens"], sample["targets"], strict=True):
            whole = [int(tokens[0]), *targets.tolist()]
            given = [-1, *tokens[1:].tolist()]
            assert all(t in (-100, g) for t, g in zip(targets[:-1].tolist(), given[1:], strict=True))
            pair.append(
                "".join(
                    "." if t == -100 else splits.tokenizer.decode([t], skip_special_tokens=False) for t in whole[1:]
                )
            )
        assert bool((last > 0).all())
        found.append([text.strip(".") for text in pair])
    return found


def message(role, content):
    return {"role": role, "content": content}


def test_all_preference_row_formats_give_the_same_pairs(tmp_path):
    lists = [
        {name: [message("user" if name == "prompt" else "assistant", text)] for name, text in row.items()}
        for row in ROWS
    ]
    implicit = [{name: row["prompt"] + row[name] for name in ("chosen", "rejected")} for row in lists]
    both = [{**one, "prompt": row["prompt"]} for one, row in zip(implicit, ROWS, strict=True)]
    found = []
    for name, rows in (("texts", ROWS), ("lists", lists), ("implicit", implicit), ("both", both)):
        found.append(load(write(tmp_path / f"{name}.jsonl", rows)))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{name}.parquet")
        found.append(load(tmp_path / f"{name}.parquet"))
    assert (len(found[0].train), len(found[0].validation)) == (16, 4)
    for splits in found:
        for split in ("train", "validation"):
            kept = [row for row in ROWS if [f"{row['chosen']}{END}", f"{row['rejected']}{END}"] in texts(splits, split)]
            assert len(kept) == len(getattr(splits, split))
            assert texts(splits, split) == texts(found[0], split)
    first = found[0].validation[0]["tokens"]
    assert found[0].tokenizer.decode(first[0].tolist()).startswith("user: ?")


def test_assistant_turns_after_the_shared_messages_are_trained(tmp_path):
    shared = [message("system", "S"), message("user", "a"), message("assistant", "b"), message("user", "c")]
    long = [message("assistant", "d"), message("user", "e"), message("assistant", "f")]
    rows = [{"chosen": shared + long, "rejected": [*shared, message("assistant", "g")]}]
    splits = load(
        write(tmp_path / "a.jsonl", rows), validation_path=str(write(tmp_path / "v.jsonl", ROWS[:1])), seq_len=96
    )
    ((chosen, rejected),) = texts(splits)
    assert chosen == f"d{END}{'.' * len('user: e;assistant: ')}f{END}"
    assert rejected == f"g{END}"
    (prompt,) = splits.prompts
    assert (splits.tokenizer.decode(list(prompt.tokens)), prompt.answer) == ("user: ?\nassistant: ", "yes 0")


def test_preference_pairs_are_padded_together_and_counted_without_padding(tmp_path):
    splits = load(write(tmp_path / "rows.jsonl", ROWS))
    pairs = splits.train
    batch = pairs.batch([3, 0, 5])
    longest = max(pairs[index]["tokens"].shape[1] for index in (3, 0, 5))
    assert batch["tokens"].shape == batch["targets"].shape == (3, 2, longest)
    for row, index in enumerate((3, 0, 5)):
        for name, value in pairs[index].items():
            assert torch.equal(batch[name][row, :, : value.shape[1]], value)
    assert pairs[pairs.longest]["tokens"].shape[1] == pairs.examples.lengths.max()
    assert pairs.num_tokens([3, 0]) == sum(pairs.examples.lengths[[6, 7, 0, 1]])
    notes = splits.notes
    assert (notes["rows"], notes["train_rows"], notes["validation_rows"]) == (20, 16, 4)
    learnt = [
        [len(text.replace(END, "$")) for text in pair]
        for split in ("train", "validation")
        for pair in texts(splits, split)
    ]
    assert [notes["chosen_tokens"], notes["rejected_tokens"]] == pytest.approx(
        torch.tensor(learnt, dtype=float).mean(0).tolist()
    )
    assert notes["row_tokens"]["max"] == 1 + max(
        splits.train.examples.lengths.max(), splits.validation.examples.lengths.max()
    )
    assert json.loads(json.dumps(notes)) == notes


PROMPT = [message("user", "a")]
BAD = {
    "cannot be read": ('{"prompt": ', "is not JSON"),
    "without a pair": ({"prompt": "a", "chosen": "b"}, "has no rejected (its columns: chosen, prompt)"),
    "without a prompt": ({"chosen": "a", "rejected": "b"}, "has no prompt, and chosen and rejected do not begin"),
    "chosen equals rejected": (
        {"prompt": "a", "chosen": "b", "rejected": "b"},
        "has the same answer in chosen and rej",
    ),
    "empty answer": ({"prompt": "a", "chosen": "b", "rejected": " "}, "has an empty answer as rejected"),
    "no assistant turn": (
        {"chosen": PROMPT, "rejected": [*PROMPT, message("assistant", "b")]},
        "has no assistant turn in chosen right after the prompt",
    ),
    "wrong type": ({"prompt": "a", "chosen": 3, "rejected": "b"}, "has int as chosen, not a list of messages"),
    "longer than seq_len": ({"prompt": "a", "chosen": "b" * 64, "rejected": "b"}, "more than data.seq_len=64"),
}


def test_bad_preference_rows_are_reported_by_file_and_line_or_skipped(tmp_path):
    valid = str(write(tmp_path / "valid.jsonl", ROWS[:2]))
    for number, (kind, (row, said)) in enumerate(BAD.items()):
        path = write(tmp_path / f"{number}.jsonl", [*ROWS[:number], row, *ROWS[number:]])
        with pytest.raises(ConfigError) as refused:
            load(path, validation_path=valid)
        first, last = map(str, refused.value.violations)
        assert first.startswith(f"data.path: {path}:{number + 1} has " if number else "data.path: ")
        assert said in first
        assert last == f"data.path: 1 of 23 rows cannot be used (1 {kind}); correct them, or set data.on_bad_row=skip"
        skipped = load(path, validation_path=valid, on_bad_row=OnBadRow.skip)
        assert skipped.notes["skipped_rows"] == {kind: 1}
        assert len(skipped.train) == 20


def test_arithmetic_rejected_answer_differs_by_one_carry(tmp_path):
    assert Sum(47, 38).solution(0) == "7+8=15, 4+3=7. Answer: 75"
    assert Sum(47, 31).solution(0) == "7+1=8, 4+3+1=8. Answer: 88"
    assert Sum(199, 201).solution(1) == "9+1=10, 9+0+1=10, 1+2=3. Answer: 300"
    options = {"seed": 1, "num_rows": 50, "seq_len": 160, "vocab_size": 257, "tokenizer": None, "held_out": 0.05}
    splits = arithmetic(form=ArithmeticForm.preferences, cache_dir=str(tmp_path), **options)
    for chosen, rejected in texts(splits):
        right, wrong = (int(text.split("Answer: ")[1].removesuffix(END)) for text in (chosen, rejected))
        assert abs(right - wrong) in (10, 100)
