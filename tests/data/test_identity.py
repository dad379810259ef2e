"""The identity of data changes with its content and settings, not with the location of its files."""

import inspect
import json
import sysconfig

import pytest

import foundry
from foundry.config.schemas.data import TextFiles
from foundry.data.corpora.corpus import files_corpus, stdlib_corpus
from foundry.data.corpora.text import text_files
from foundry.data.images.digits import digits

LINES = [f"{n} plus {n} is {2 * n}" for n in range(60)]


def corpus(folder, path=".", **options):
    return files_corpus(TextFiles(**{"path": str(folder / path), "held_out": 0.1, "cache_dir": str(folder)} | options))


def write(folder, texts, kind="txt"):
    folder.mkdir()
    for name, lines in texts.items():
        content = "\n".join(lines if kind == "txt" else [json.dumps({"text": line}) for line in lines])
        (folder / f"{name}.{kind}").write_text(content)
    return folder


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_identity_ignores_names_and_locations_of_files(tmp_path, kind):
    one = write(tmp_path / "one", {"a": LINES[:30], "b": LINES[30:]}, kind)
    other = write(tmp_path / "other", {"x": LINES[:30], "y": LINES[30:]}, kind)
    assert corpus(one).content == corpus(other).content


OTHERS = {
    "a line": {"a": [*LINES[:29], "another"], "b": LINES[30:]},
    "the order": {"a": LINES[30:], "b": LINES[:30]},
    "the end of a file": {"a": LINES[:31], "b": LINES[31:]},
    "one file more": {"a": LINES[:30], "b": LINES[30:], "c": ["more"]},
    "one file less": {"a": LINES[:30]},
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_identity_depends_on_the_contents_of_files(tmp_path, kind, other):
    one = corpus(write(tmp_path / "one", {"a": LINES[:30], "b": LINES[30:]}, kind))
    two = corpus(write(tmp_path / "two", OTHERS[other], kind))
    assert one.content != two.content
    assert one.fingerprint != two.fingerprint


def test_identity_depends_on_the_held_out_files(tmp_path):
    folder = write(tmp_path / "one", {"a": LINES[:20], "b": LINES[20:40], "c": LINES[40:]})
    found = {
        corpus(folder, "[ab].txt", validation_path=str(folder / "c.txt")).content,
        corpus(folder, "a.txt", validation_path=str(folder / "[bc].txt")).content,
        corpus(folder).content,
        corpus(folder, held_out=0.4).content,
    }
    assert len(found) == 4


def test_identity_of_stdlib_corpus_depends_on_its_files(tmp_path, monkeypatch):
    found = []
    for number, body in enumerate(["x = 1", "x = 1", "x = 2"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name in ("a", "b", "c"):
            (folder / f"{name}.py").write_text(body)
        monkeypatch.setattr(sysconfig, "get_path", lambda _, folder=folder: str(folder))
        found.append(stdlib_corpus(held_out=0.4).content)
    assert found[0] == found[1] != found[2]


def test_identity_of_text_depends_on_files_order_and_seq_len(tmp_path):
    one = write(tmp_path / "one", {"a": LINES})
    other = write(tmp_path / "other", {"b": LINES})
    settings = {"seed": 0, "seq_len": 8, "vocab_size": 300, "tokenizer": None, "held_out": 0.1}
    splits = [text_files(path=str(folder), cache_dir=str(tmp_path / "cache"), **settings) for folder in (one, other)]
    first, second = (split.identity() for split in splits)
    assert {**first, "order": None} == {**second, "order": None}
    assert first["order"] != second["order"]
    assert first["samples"] == len(splits[0].train)
    longer = text_files(path=str(one), cache_dir=str(tmp_path / "cache"), **{**settings, "seq_len": 9}).identity()
    assert longer["content"] != first["content"]
    assert json.loads(json.dumps(first)) == first


def test_identity_of_images_depends_on_held_out_and_not_on_the_seed():
    first, second = (digits(seed=seed, held_out=0.1).identity() for seed in (0, 1))
    assert first == second
    assert first["tokenizer"] is None
    assert first != digits(seed=0, held_out=0.2).identity()


def test_settings_object_gives_the_same_data_as_keywords(tmp_path):
    folder = write(tmp_path / "one", {"a": LINES})
    options = {"path": str(folder), "cache_dir": str(tmp_path / "cache"), "seq_len": 8, "vocab_size": 300}
    by_keywords, by_object = text_files(**options), text_files(TextFiles(**options, tokenizer=None), seed=5)
    assert by_keywords.identity() == by_object.identity()


@pytest.mark.parametrize(
    ("part", "needed"),
    [
        ("arithmetic", set()),
        ("chat_files", {"path"}),
        ("digits", set()),
        ("image_chat_files", {"path"}),
        ("image_folder", {"path", "num_classes"}),
        ("preference_files", {"path"}),
        ("prompt_files", {"path", "max_new_tokens"}),
        ("stdlib_text", set()),
        ("text_files", {"path"}),
        ("token_files", {"path"}),
    ],
)
def test_dataset_functions_require_few_keywords(part, needed):
    parameters = inspect.signature(getattr(foundry.datasets, part)).parameters.values()
    assert {each.name for each in parameters if each.default is inspect.Parameter.empty} == needed
