"""Ranks whose run directory is on local disks of nodes: finding the disks, saving, verification and exchange.

Each rank changes into another folder, so that the relative path of the run directory leads to another disk.
"""

import os
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from support.harness import run_ranks

pytestmark = pytest.mark.distributed

RUN = Path("run")
NUM_ROWS = 6


def on_own_disk(world, root, leaders):
    """Change into the folder of this rank's disk; return the world with the disks of `leaders`."""
    from foundry.parallel.disks import Disks
    from foundry.parallel.process_group import side_group

    folder = root / f"disk{leaders[world.rank]}"
    (folder / RUN).mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    disks = Disks(tuple(leaders))
    return replace(world, disks=replace(disks, group=side_group(world, disks.of_leaders)))


def saver(world, **options):
    from support import checkpoint_parts

    return checkpoint_parts.saver(RUN, world, **{"asynchronous": True, "strict": True} | options)


def save(checkpointer, step, world, **options):
    import torch

    tensors = {f"t{n}": torch.full((NUM_ROWS, n + 1), float(10 * step + n)) for n in range(5)}
    manifest = {"state": {"rank": world.rank}}  # differs between ranks: that of rank 0 counts
    checkpointer.write(
        step, tensors=lambda: tensors, manifest=manifest, rank_state={"rank": world.rank}, wait=True, **options
    )


def save_steps(world, root, leaders, steps, options):
    world = on_own_disk(world, root, leaders) if leaders else world
    if not leaders:
        os.chdir(root)
    checkpointer = saver(world, **options)
    for step in steps:
        save(checkpointer, step, world, is_best=step == steps[0])
    return checkpointer.failed_saves


def contents(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_checkpoint_on_two_disks_is_that_of_a_shared_one_in_parts(tmp_path):
    (tmp_path / "shared").mkdir()
    run_ranks(save_steps, 3, tmp_path / "shared", [], [1], {})
    run_ranks(save_steps, 3, tmp_path, [0, 1, 0], [1], {})
    whole = contents(tmp_path / "shared" / RUN / "checkpoints" / "step_00000001")
    first, second = (contents(tmp_path / f"disk{n}" / RUN / "checkpoints" / "step_00000001") for n in (0, 1))
    assert first | second == whole
    own = {"shard-00001.safetensors", "rank-00001.json"}
    assert set(second) == own | {"manifest.json", "tensors.json"}
    assert set(first) == set(whole) - own
    assert (tmp_path / "disk1" / RUN / "checkpoints" / "latest").readlink() == Path("step_00000001")


def test_disks_keep_the_same_checkpoints_and_that_which_is_copied(tmp_path):
    assert run_ranks(save_and_hold, 2, tmp_path) == [[1, 2, 5], [1, 2, 5]]


def save_and_hold(world, root):
    from types import SimpleNamespace

    from foundry.run_dir.checkpoints import list_checkpoints, parse_step

    world = on_own_disk(world, root, [0, 1])
    mirror = SimpleNamespace(held_step=2 if world.is_main else None, notify=lambda: None)
    checkpointer = saver(world, keep_last=1, mirror=mirror)
    for step in range(1, 6):
        save(checkpointer, step, world, is_best=step == 1)
    return sorted(map(parse_step, list_checkpoints(RUN)))


def find(world, root, leaders):
    from foundry.checkpoint.exchange import find_newest

    world = on_own_disk(world, root, leaders)
    newest = find_newest(RUN, world)
    return None if newest is None else newest.name


def lose(folder):
    shutil.rmtree(folder)


def damage_shard(folder):
    (shard,) = folder.glob("shard-*")
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")


def test_every_disk_receives_all_files_of_the_newest_checkpoint(tmp_path, monkeypatch):
    run_ranks(save_steps, 3, tmp_path, [0, 1, 0], [1, 2], {})
    assert run_ranks(find_in_small_pieces, 3, tmp_path, [0, 1, 0]) == ["step_00000002"] * 3
    first, second = (contents(tmp_path / f"disk{n}" / RUN / "checkpoints" / "step_00000002") for n in (0, 1))
    assert first == second
    assert len(first) == 8
    older = [set(contents(tmp_path / f"disk{n}" / RUN / "checkpoints" / "step_00000001")) for n in (0, 1)]
    assert [len(names) for names in older] == [6, 4]
    leftovers = [path.name for n in (0, 1) for path in (tmp_path / f"disk{n}" / RUN / "checkpoints").glob(".*")]
    assert leftovers == []


def find_in_small_pieces(world, root, leaders):
    from foundry.checkpoint import exchange

    size, exchange._PIECE_BYTES = exchange._PIECE_BYTES, 100
    try:
        return find(world, root, leaders)
    finally:
        exchange._PIECE_BYTES = size


@pytest.mark.long
def test_disk_without_the_checkpoint_receives_it_if_another_has_all_files(tmp_path):
    run_ranks(save_steps, 2, tmp_path, [0, 1], [1], {})
    run_ranks(find, 2, tmp_path, [0, 1])
    lose(tmp_path / "disk1" / RUN / "checkpoints")
    assert run_ranks(find, 2, tmp_path, [0, 1]) == ["step_00000001"] * 2
    first, second = (contents(tmp_path / f"disk{n}" / RUN / "checkpoints" / "step_00000001") for n in (0, 1))
    assert first == second


@pytest.mark.parametrize("harm", [lose, damage_shard])
def test_older_checkpoint_is_used_if_no_disk_has_a_file_of_the_newest(tmp_path, harm):
    run_ranks(save_steps, 2, tmp_path, [0, 1], [1, 2], {})
    harm(tmp_path / "disk1" / RUN / "checkpoints" / "step_00000002")
    assert run_ranks(find, 2, tmp_path, [0, 1]) == ["step_00000001"] * 2


def test_checkpoint_that_rank_0_has_not_published_does_not_count(tmp_path):
    run_ranks(save_steps, 2, tmp_path, [0, 1], [1, 2], {})
    lose(tmp_path / "disk0" / RUN / "checkpoints" / "step_00000002")
    assert run_ranks(find, 2, tmp_path, [0, 1]) == ["step_00000001"] * 2
    run_ranks(save_steps, 2, tmp_path, [0, 1], [2], {})
    assert run_ranks(find, 2, tmp_path, [0, 1]) == ["step_00000002"] * 2


def fail_on_the_other_disk(world, root):
    from foundry.core.protocols import SaveError

    world = on_own_disk(world, root, [0, 1])
    checkpointer = saver(world)
    save(checkpointer, 1, world)
    if world.rank == 1:
        checkpointer._writer._check_run_dir = lambda: 1 / 0
    try:
        save(checkpointer, 2, world)
    except SaveError as error:
        reason = str(error)
    return reason, sorted(path.name for path in (RUN / "checkpoints").iterdir())


def test_save_that_fails_on_one_disk_leaves_earlier_checkpoints_on_all(tmp_path):
    for reason, names in run_ranks(fail_on_the_other_disk, 2, tmp_path):
        assert "rank 1: ZeroDivisionError" in reason
        assert names == ["latest", "step_00000001"]


def lock(world, root, mirror, options, folders):
    """Lock the run directory as a node that changes into its folder; return the leaders, or the error."""
    from foundry.config.schemas.checkpoint import Checkpoint
    from foundry.core.errors import ConfigError
    from foundry.engine import directory

    (root / folders[world.rank]).mkdir(exist_ok=True)
    os.chdir(root / folders[world.rank])
    directory._PATIENCE_SECONDS = directory._LONG_PATIENCE_SECONDS = 0.2
    world = replace(world, local_rank=options["local_ranks"][world.rank])
    settings = Checkpoint(mirror=mirror, **options.get("checkpoint", {}))
    try:
        with ExitStack() as stack:
            world, run_dir, _ = directory.lock_run_dir(world, RUN, "hash", settings, stack)
            assert run_dir == RUN
            world.barrier()  # rank 0 has deleted its token
            files = sorted(path.name for path in RUN.iterdir()) if RUN.exists() else []
            return None if world.disks is None else (world.disks.leaders, world.leads_disk), files
    except ConfigError as error:
        return str(error), RUN.exists()


LOCAL = {"local_ranks": [0, 0, 1]}
FOLDERS = ["a", "b", "b"]


def test_ranks_find_the_disks_of_their_nodes(tmp_path):
    files = [".lock"], [".foundry", ".lock"]
    assert run_ranks(lock, 3, tmp_path, "file:///x", LOCAL, FOLDERS) == [
        (((0, 1, 1), True), files[0]),
        (((0, 1, 1), True), files[1]),
        (((0, 1, 1), False), files[1]),
    ]


def test_ranks_that_share_the_run_directory_have_no_local_disks(tmp_path):
    for mirror in ("file:///x", None):
        results = run_ranks(lock, 3, tmp_path, mirror, LOCAL, ["a"] * 3)
        assert results == [(None, [".lock"])] * 3


def test_local_disks_are_refused_without_a_mirror(tmp_path):
    for message, _ in run_ranks(lock, 3, tmp_path, None, LOCAL, FOLDERS):
        assert message == (
            "hydra.run.dir: is run, but on the node of rank 1 this path is on a local disk; choose a folder that all"
            " nodes share, or set checkpoint.mirror=URL"
        )
    assert [path.name for path in (tmp_path / "a" / RUN).iterdir()] == [".lock"]
    assert not (tmp_path / "b" / RUN).exists()


def test_folder_of_the_user_on_the_disk_of_another_node_is_refused_and_stays(tmp_path):
    (tmp_path / "b" / RUN).mkdir(parents=True)
    (tmp_path / "b" / RUN / "thesis.txt").write_text("x")
    for message, _ in run_ranks(lock, 3, tmp_path, "file:///x", LOCAL, FOLDERS):
        assert "which has files that are not foundry's on the disk of another node" in message
    assert [path.name for path in (tmp_path / "b" / RUN).iterdir()] == ["thesis.txt"]


def test_rank_that_sees_no_folder_of_its_node_is_refused(tmp_path):
    for message, _ in run_ranks(lock, 3, tmp_path, "file:///x", LOCAL, ["a", "b", "c"]):
        assert "rank 2 sees no folder there that a rank of its node has made" in message
    assert not (tmp_path / "b" / RUN).exists()
