"""Folders that take seconds to make, such as a trained run's: made once for all test processes of a session."""

import shutil

from filelock import FileLock


def built_once(name, build, cache, tmp_path_factory):
    """This process's own copy of the folder that `build(folder)` fills in the first process that asks for it.

    `cache` is the folder that all test processes share. What failed to build is built again by the next that asks.
    """
    original = cache.parent / "built" / name
    original.parent.mkdir(exist_ok=True)
    done = original.with_suffix(".done")
    with FileLock(original.with_suffix(".lock")):
        if not done.exists():
            shutil.rmtree(original, ignore_errors=True)
            original.mkdir()
            build(original)
            done.touch()
    return shutil.copytree(original, tmp_path_factory.mktemp(name) / name, symlinks=True)
