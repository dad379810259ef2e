import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.built_once import built_once


def test_built_once_builds_once_and_gives_each_caller_a_copy(tmp_path, tmp_path_factory):
    built = []

    def build(folder):
        built.append(folder)
        time.sleep(0.1)  # the other threads wait meanwhile
        (folder / "text").write_text("whole")

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(built_once, "x", build, tmp_path / "cache", tmp_path_factory) for _ in range(4)]
        folders = [future.result() for future in asked]
    assert len(built) == 1
    assert len({*built, *folders}) == 5
    assert [(folder / "text").read_text() for folder in folders] == ["whole"] * 4


def test_built_once_retries_a_failed_build(tmp_path, tmp_path_factory):
    def fail(folder):
        (folder / "half").touch()
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        built_once("x", fail, tmp_path / "cache", tmp_path_factory)
    folder = built_once("x", lambda folder: (folder / "whole").touch(), tmp_path / "cache", tmp_path_factory)
    assert [path.name for path in folder.iterdir()] == ["whole"]
