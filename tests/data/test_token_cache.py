"""Cached tokens are verified before use, rebuilt if damaged, and published atomically."""

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from foundry.core.errors import ConfigError
from foundry.data.corpora.text import text_files
from foundry.data.io import cached_folder
from foundry.run_dir.lock import lock

FILES = ["train.npy", "validation.npy", "tokenizer.json", "statistics.json", "manifest.json"]
NAME = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for number in range(20):
        (folder / f"{number:02}.txt").write_text(f"Document {number}: the dog runs over the hill.\n" * 3)
    load(folder)
    return folder


def load(folder, **changes):
    options = {"seed": 0, "seq_len": 8, "vocab_size": 300, "tokenizer": None, "held_out": 0.2}
    options["cache_dir"] = str(folder / "cache")
    return text_files(path=str(folder / "*.txt"), **options | changes)


def tokens(splits):
    return splits.train.tokens.tolist(), splits.validation.tokens.tolist(), splits.tokenizer.to_str()


def cached(folder):
    (found,) = (path for path in (folder / "cache").iterdir() if path.is_dir())
    return found


def zeroed(content, at):
    return content[:at] + bytes(len(content) - at)


DAMAGES = {
    "zeroed": zeroed,
    "truncated": lambda content, at: content[:at],
    "emptied": lambda content, at: b"",
    "flipped": lambda content, at: content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :],
    "longer": lambda content, at: content + b"\0",
    "missing": None,
}


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(FILES), kind=st.sampled_from(sorted(DAMAGES)), share=st.floats(0, 0.99))
def test_damaged_cache_file_is_rebuilt_with_a_warning(made, caplog, name, kind, share):
    whole = tokens(load(made))
    file = cached(made) / name
    content = file.read_bytes()
    changed = None if DAMAGES[kind] is None else DAMAGES[kind](content, int(share * len(content)))
    if changed == content:
        return
    times = (file.stat().st_atime_ns, file.stat().st_mtime_ns)
    if changed is None:
        file.unlink()
    else:
        file.write_bytes(changed)
        os.utime(file, ns=times)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert tokens(load(made)) == whole
    still_right = name == "manifest.json" and cached_folder.find_damage(cached(made)) is None and not caplog.records
    if not still_right:  # A flipped bit in the manifest's unused "format" is no damage.
        (record,) = caplog.records
        assert "creating the tokens again" in record.getMessage()
    assert cached_folder.find_damage(cached(made)) is None
    caplog.clear()
    load(made)
    assert not caplog.records


def test_large_cache_is_checksummed_again_only_if_it_changed(made, monkeypatch):
    monkeypatch.setattr(cached_folder, "_ALWAYS_BYTES", 0)
    folder, summed = cached(made), []
    checksum = cached_folder._checksum
    monkeypatch.setattr(cached_folder, "_checksum", lambda file: summed.append(file.name) or checksum(file))
    (folder / ".verified").unlink(missing_ok=True)
    for _ in range(3):
        assert cached_folder.find_damage(folder) is None
    assert len(summed) == 4
    content, status = (folder / "train.npy").read_bytes(), (folder / "train.npy").stat()
    (folder / "train.npy").write_bytes(zeroed(content, len(content) // 2))
    os.utime(folder / "train.npy", ns=(status.st_atime_ns, status.st_mtime_ns))
    assert cached_folder.find_damage(folder) == "train.npy has changed since it was written"
    (folder / "train.npy").write_bytes(content)
    assert cached_folder.find_damage(folder) is None


def test_temporary_folders_of_dead_processes_only_are_swept(tmp_path):
    dead, live, fresh, old, theirs = (tmp_path / f".{NAME}.{word}" for word in ("dead", "live", "fresh", "old", "x.y"))
    for folder in (dead, live, fresh, old, theirs):
        folder.mkdir()
        (folder / "train.raw").write_bytes(b"half")
    (dead / ".lock").write_text(socket.gethostname())
    for path in (old / "train.raw", old):
        os.utime(path, (1e9, 1e9))
    with ExitStack() as held:
        assert lock(live, held)
        cached_folder.sweep_temporaries(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {live.name, fresh.name, theirs.name}


def test_second_publication_keeps_the_first_complete_folder(tmp_path):
    for content in (b"first", b"second"):
        temporary = cached_folder.temporary_for(tmp_path / NAME)
        (temporary / "file").write_bytes(content)
        cached_folder.seal(temporary, ("file",))
        cached_folder.publish(temporary, tmp_path / NAME)
    assert (tmp_path / NAME / "file").read_bytes() == b"first"
    assert cached_folder.find_damage(tmp_path / NAME) is None


def test_cached_arrays_are_never_unpickled(made):
    folder = cached(made)
    np.save(folder / "train.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["files"]["train.npy"] = {
        "bytes": (folder / "train.npy").stat().st_size,
        "xxh3_128": cached_folder._checksum(folder / "train.npy"),
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="Python objects"):
        load(made)
    shutil.rmtree(folder)


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/none"])
def test_unwritable_cache_dir_is_a_config_error(made, tmp_path, path):
    (tmp_path / "file").write_text("kept")
    with pytest.raises(ConfigError, match=r"^data\.cache_dir: is .*FOUNDRY_CACHE$"):
        load(made, cache_dir=str(tmp_path / path))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(2, "No such file or directory", "/corpus/a.txt"), "data: .*: /corpus/a.txt: No such file"),
        (OSError(5, "Input/output error"), "data: the tokens cannot be created: Input/output error; check the source"),
        (OSError(28, "No space left on device"), "data.cache_dir: is .*, which cannot store the tokens: No space"),
        (OSError(28, "No space left on device", "CACHE/x"), "data.cache_dir: is .*, which cannot store the tokens"),
    ],
)
def test_error_while_filling_the_cache_names_the_source_or_the_cache(tmp_path, error, message):
    def fill(folder):
        if error.filename == "CACHE/x":
            error.filename = str(folder / "x")
        raise error

    with pytest.raises(ConfigError, match=f"^{message}"):
        cached_folder.cached_folder(str(tmp_path), NAME, fill)


@pytest.mark.long
def test_tokenization_memory_does_not_grow_with_the_corpus(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "token_memory.py"
    command = [sys.executable, str(script), "4", "28", "--out", str(tmp_path / "record.json")]
    subprocess.run(command, check=True, capture_output=True)
    record = json.loads((tmp_path / "record.json").read_text())
    small, large = (row["values"]["peak_mib"][0] for row in record["rows"])
    # The text alone grows by 23 MiB, its tokens as int64 by 49 MiB. Checksums read up to 16 MiB at a time.
    assert large - small < 30
