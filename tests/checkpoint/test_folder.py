"""Finding checkpoints, and reporting their damage."""

import json
import os

import pytest
from support.checkpoint_parts import ALONE, KNOWN, Net, assert_same, saver, write

from foundry.checkpoint.folder import CheckpointError, problems, read_manifest
from foundry.checkpoint.tensors import load_weights
from foundry.checkpoint.verification import verify_newest
from foundry.run_dir.checkpoints import MANIFEST, find, list_checkpoints


def test_manifest_describes_the_checkpoint(tmp_path):
    folder = write(tmp_path, 200, Net(1), metric=0.25)
    message = read_manifest(folder)
    assert (message.step, message.metric, message.world_size, message.state) == (200, 0.25, 1, {"position": 200})
    assert {name: getattr(message, name) for name in KNOWN} == KNOWN
    assert set(message.versions) == {"foundry", "python", "torch"}
    sizes = {name: facts.bytes for name, facts in message.files.items()}
    assert sizes == {path.name: path.stat().st_size for path in folder.iterdir() if path.name != MANIFEST}
    json.loads((folder / MANIFEST).read_text(), parse_constant=lambda name: pytest.fail(name))


def test_checkpoint_is_found_by_link_name_and_step(tmp_path):
    for step in (5, 10, 15):
        write(tmp_path, step, Net(step), is_best=step == 10)
    link = tmp_path / "checkpoints" / "latest"
    assert link.is_symlink()
    assert str(link.readlink()) == "step_00000015", "relative, so that a run directory can move"
    assert find(tmp_path) == find(tmp_path, "15") == (tmp_path / "checkpoints" / "step_00000015").resolve()
    assert find(tmp_path, "best").name == find(tmp_path, "10").name == "step_00000010"
    assert [folder.name[-2:] for folder in list_checkpoints(tmp_path)] == ["15", "10", "05"]
    moved = tmp_path.rename(tmp_path.with_name("moved"))
    model = Net(0)
    load_weights(find(moved), model)
    assert_same(model.state_dict(), Net(15).state_dict())


def test_missing_checkpoint_error_lists_existing_ones(tmp_path):
    with pytest.raises(FileNotFoundError, match="has no checkpoint 'last'; available: none"):
        find(tmp_path)
    for step in (5, 10):
        write(tmp_path, step, Net(0))
    for which in ("7", "best", "newest"):
        with pytest.raises(FileNotFoundError, match=f"no checkpoint '{which}'; available: step_00000005, step_0000001"):
            find(tmp_path, which)


def test_checkpoint_without_a_latest_link_is_found(tmp_path):
    folder = write(tmp_path, 5, Net(0))
    (tmp_path / "checkpoints" / "latest").unlink()
    assert find(tmp_path) == folder.resolve()


def change_byte(path, offset=-9):
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def resize(path, by):
    os.truncate(path, path.stat().st_size + by)


def edit(folder, key, value):
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**content, key: value}))


SHARD, RANK = "shard-00000.safetensors", "rank-00000.json"
DAMAGE = {
    "truncated shard": (
        lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes()[:-7]),
        f"{SHARD} has {{}} bytes, not",
    ),
    "longer shard": (
        lambda f: (f / SHARD).write_bytes((f / SHARD).read_bytes() + b"x"),
        f"{SHARD} has {{}} bytes, not",
    ),
    "missing rank": (lambda f: (f / RANK).unlink(), f"{RANK} is missing"),
    "missing shard": (lambda f: (f / SHARD).unlink(), f"{SHARD} is missing"),
    "changed byte of a tensor": (lambda f: change_byte(f / SHARD), f"{SHARD} has the checksum"),
    "changed byte of a header": (lambda f: change_byte(f / SHARD, 40), f"{SHARD} has the checksum"),
    "changed byte of a rank": (lambda f: change_byte(f / RANK, 4), f"{RANK} has the checksum"),
    "half a manifest": (lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text()[:300]), "incomplete"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), f"{MANIFEST} is missing"),
    "empty manifest": (lambda f: (f / MANIFEST).write_text(""), "incomplete or not a manifest (0 characters)"),
    "other JSON": (lambda f: (f / MANIFEST).write_text("[]"), "not a manifest"),
    "bytes for a manifest": (lambda f: (f / MANIFEST).write_bytes(b"\xff" * 9), "not text"),
    "changed manifest": (lambda f: edit(f, "samples", 9), f"{MANIFEST} does not match its checksum"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_reported_and_the_previous_one_is_used(tmp_path, damage, caplog):
    good = write(tmp_path, 1, Net(1))
    bad = write(tmp_path, 2, Net(2))
    assert problems(good) == problems(bad) == []
    assert verify_newest(tmp_path, ALONE) == bad
    harm, message = DAMAGE[damage]
    harm(bad)
    (problem,) = problems(bad)
    size = (bad / SHARD).stat().st_size if (bad / SHARD).exists() else None
    assert message.format(size) in problem
    assert verify_newest(tmp_path, ALONE) == good
    (record,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert str(bad) in record.getMessage()
    assert problem in record.getMessage()


def test_ranks_share_the_verification(tmp_path):
    folder = write(tmp_path, 1, Net(1))
    for name in (SHARD, RANK):
        (folder / name).unlink()
    parts = [problems(folder, part=part, num_parts=3) for part in range(3)]
    assert sorted(parts) == [[], [f"{RANK} is missing"], [f"{SHARD} is missing"]]


def test_verify_newest_without_checkpoints_is_none(tmp_path):
    assert verify_newest(tmp_path, ALONE) is None
    with pytest.raises(CheckpointError, match="missing"):
        read_manifest(tmp_path)


def test_saving_a_step_again_replaces_only_a_damaged_checkpoint(tmp_path):
    folder = write(tmp_path, 5, Net(1))
    before = (folder / SHARD).stat().st_mtime_ns
    write(tmp_path, 5, Net(2), is_best=True)
    assert (folder / SHARD).stat().st_mtime_ns == before, "a whole one is left alone"
    assert find(tmp_path, "best").name == "step_00000005"
    change_byte(folder / SHARD)
    write(tmp_path, 5, Net(2), checkpointer=saver(tmp_path))
    assert problems(folder) == []
    model = Net(0)
    load_weights(folder, model)
    assert_same(model.state_dict(), Net(2).state_dict())
    assert sorted(p.name for p in folder.parent.iterdir()) == ["best", "latest", "step_00000005"]
