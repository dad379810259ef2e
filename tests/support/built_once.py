"""Folders that take seconds to build, such as a trained run: built once for all test processes of a session."""

import shutil

from filelock import FileLock


def built_once(name, build, cache, tmp_path_factory):
    """Return a private copy of a folder that `build(folder)` fills in the first process that needs it.

    `cache` is the folder shared by all test processes. If a build fails, the next call builds again.
    """
    original = cache.parent / "built" / name
    original.parent.mkdir(exist_ok=True)
    marker = original.with_suffix(".done")
    with FileLock(original.with_suffix(".lock")):
        if not marker.exists():
            shutil.rmtree(original, ignore_errors=True)
            original.mkdir()
            build(original)
            marker.touch()
    return shutil.copytree(original, tmp_path_factory.mktemp(name) / name, symlinks=True)
