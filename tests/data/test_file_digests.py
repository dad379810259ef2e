import hashlib
import os
import time

import pytest

from foundry.data.io import file_digests as module
from foundry.data.io.file_digests import file_digests


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LARGE_BYTES", 0)
    monkeypatch.setattr(module, "_SETTLED_NS", 0)
    found = [tmp_path / name for name in ("a.txt", "b.txt")]
    for file in found:
        file.write_text(file.name)
    return found


@pytest.fixture
def hashed(monkeypatch):
    """Collect the name of a file each time it is hashed."""
    names, real = [], module._hash
    monkeypatch.setattr(module, "_hash", lambda file: names.append(file.name) or real(file))
    return names


def expected(files):
    return [hashlib.sha256(file.read_bytes()).digest() for file in files]


def test_digests_of_a_large_corpus_are_computed_once(files, tmp_path, hashed):
    for _ in range(3):
        assert file_digests(files, str(tmp_path / "cache")) == expected(files)
    assert hashed == ["a.txt", "b.txt"]


def test_digests_of_a_small_corpus_are_not_cached(files, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LARGE_BYTES", 100)
    assert file_digests(files, str(tmp_path / "cache")) == expected(files)
    assert not (tmp_path / "cache").exists()


def test_changed_file_is_hashed_again_even_with_an_unchanged_mtime(files, tmp_path, hashed):
    cache = str(tmp_path / "cache")
    file_digests(files, cache)
    times = files[0].stat().st_atime_ns, files[0].stat().st_mtime_ns
    files[0].write_text("c.txt")
    os.utime(files[0], ns=times)
    assert file_digests(files, cache) == expected(files)
    files[1].unlink()
    files[1].write_text("other")
    assert file_digests(files, cache) == expected(files)
    assert hashed == ["a.txt", "b.txt"] * 3


def test_digest_of_a_just_modified_file_is_not_cached(files, tmp_path, hashed, monkeypatch):
    monkeypatch.setattr(module, "_SETTLED_NS", 3600 * 10**9)
    file_digests(files, str(tmp_path / "cache"))
    file_digests(files, str(tmp_path / "cache"))
    assert len(hashed) == 4


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": 1}', '{"a": [1, "no digits"]}'])
def test_damaged_digest_cache_is_rebuilt(files, tmp_path, hashed, content):
    cache = tmp_path / "cache"
    file_digests(files, str(cache))
    (kept,) = cache.glob("*.digests.json")
    kept.write_text(content)
    assert file_digests(files, str(cache)) == expected(files)
    assert len(hashed) == 4
    assert file_digests(files, str(cache)) == expected(files)
    assert len(hashed) == 4


def test_unwritable_cache_does_not_prevent_file_digests(files, tmp_path):
    (tmp_path / "file").write_text("kept")
    assert file_digests(files, str(tmp_path / "file")) == expected(files)


def test_concurrent_processes_hash_each_file_once(files, tmp_path):
    cache, log = str(tmp_path / "cache"), tmp_path / "log"
    children = []
    for _ in range(3):
        if (child := os.fork()) == 0:
            real = module._hash

            def slow(file, real=real):
                with log.open("a") as stream:
                    stream.write(f"{file.name}\n")
                time.sleep(0.1)
                return real(file)

            module._hash = slow
            os._exit(0 if file_digests(files, cache) == expected(files) else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert log.read_text().split() == ["a.txt", "b.txt"]
