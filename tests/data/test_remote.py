"""Files behind URLs: fetched once, and read like local files. No test needs a network."""

import functools
import gzip
import http.server
import json
import threading

import fsspec
import numpy as np
import pytest

from foundry.core.errors import ConfigError
from foundry.data.corpora.text import text_files
from foundry.data.corpora.token_files import token_files
from foundry.data.io.remote import fetch_files

ROWS = [f"Document {n}: the dog runs over the hill.\n" for n in range(40)]
LINES = "".join(json.dumps({"text": row}) + "\n" for row in ROWS)


@pytest.fixture
def memory():
    """Return the in-memory file system of fsspec, empty."""
    system = fsspec.filesystem("memory")
    system.rm("/", recursive=True) if system.ls("/") else None
    yield system
    system.rm("/", recursive=True) if system.ls("/") else None


def load(path, folder, **changes):
    options = {"seed": 0, "seq_len": 8, "vocab_size": 300, "tokenizer": None, "held_out": 0.2}
    return text_files(path=path, cache_dir=str(folder / "cache"), **options | changes)


def tokens(splits):
    return splits.train.tokens.tolist(), splits.validation.tokens.tolist()


@pytest.mark.parametrize("url", ["memory://one/a.jsonl", "memory://one/*.jsonl", "memory://one"])
def test_remote_file_glob_and_folder_match_a_local_file(tmp_path, memory, url):
    memory.pipe("/one/a.jsonl", LINES.encode())
    memory.pipe("/one/README.md", b"# What this is")
    memory.pipe("/one/picture.png", b"no text")
    (tmp_path / "known.jsonl").write_text(LINES)
    assert tokens(load(url, tmp_path)) == tokens(load(str(tmp_path / "known.jsonl"), tmp_path))


def test_cached_remote_file_is_not_fetched_again(tmp_path, memory):
    memory.pipe("/one/a.jsonl", LINES.encode())
    first = load("memory://one/a.jsonl", tmp_path)
    memory.rm("/one/a.jsonl")
    assert load("memory://one/a.jsonl", tmp_path).identity() == first.identity()
    with pytest.raises(ConfigError, match=r"memory://one/a\.jsonl cannot be read: .*check network"):
        load("memory://one/a.jsonl", tmp_path / "another")


def test_remote_and_local_sources_are_mixed_in_shares(tmp_path, memory):
    memory.pipe("/a.jsonl.gz", gzip.compress(LINES.encode()))
    (tmp_path / "b.txt").write_text("OMEGA PSI\n" * 300)
    splits = load(["memory://a.jsonl.gz", str(tmp_path / "b.txt")], tmp_path, weights=[0.7, 0.3])
    assert [source["share"] for source in splits.notes["sources"]] == [0.7, 0.3]


def test_remote_token_file_is_read(tmp_path, memory):
    memory.pipe("/train.bin", np.arange(900, dtype=np.uint16).tobytes())
    options = {"seed": 0, "seq_len": 8, "vocab_size": 1000, "held_out": 0.1, "cache_dir": str(tmp_path / "cache")}
    assert token_files(path="memory://train.bin", **options).train[0]["tokens"].tolist() == list(range(8))


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("memory://nowhere", "has no files; give a file, folder or glob"),
        ("memory://nowhere/*.txt", "has no files; give a file, folder or glob"),
        ("nowhere://a.txt", "cannot be read: Protocol not known: nowhere"),
        ("http://127.0.0.1:9/a.txt", "cannot be read: "),
        ("hf://datasets/nobody/nothing", "cannot be read: "),
    ],
)
def test_unreachable_url_is_a_one_line_config_error(tmp_path, memory, url, named, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=r"data\.path: ") as refused:
        load(url, tmp_path)
    (violation,) = refused.value.violations
    assert url in violation.message
    assert named in violation.message
    assert "\n" not in violation.message
    assert not list(tmp_path.glob("cache/*/manifest.json"))


def test_remote_file_names_stay_inside_the_cache_folder(tmp_path, memory):
    for name in ("/x/../a.txt", "/x/a.txt", "/y/a.txt"):
        memory.pipe(name, name.encode())
    found = fetch_files("memory://", key="data.path", kinds={".txt": "text"}, cache_dir=str(tmp_path / "cache"))
    (folder,) = {file.parent for file in found}
    assert folder.parent == tmp_path / "cache"
    assert [file.name for file in found] == [f"0000{number}-a.txt" for number in range(len(found))]


def test_http_file_matches_the_local_file(tmp_path):
    pytest.importorskip("aiohttp")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "a.jsonl").write_text(LINES)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/a.jsonl?download=true"
        assert tokens(load(url, tmp_path)) == tokens(load(str(tmp_path / "served" / "a.jsonl"), tmp_path))
        server.shutdown()
