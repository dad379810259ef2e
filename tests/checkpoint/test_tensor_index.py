"""The tensor index locates tensors without reading every header; parts of tensors are read individually."""

import json
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.checkpoint_parts import Net, assert_same, rewrite_manifest, write

from foundry.checkpoint.folder import CheckpointError, problems, read_manifest
from foundry.checkpoint.shard import Chunk, write_shard
from foundry.checkpoint.tensor_index import INDEX, build_index, read_index
from foundry.checkpoint.tensors import load_weights

NUM_SHARDS, ROWS = 256, 4
_opened = {"folder": None, "names": []}


def _note_open(event, arguments):
    if event == "open" and _opened["folder"] is not None and str(arguments[0]).startswith(_opened["folder"]):
        _opened["names"].append(str(arguments[0]).rpartition("/")[2])


sys.addaudithook(_note_open)


@pytest.fixture
def opened(tmp_path):
    """Collect the name of each file below `tmp_path` that is opened, once for each opening."""
    _opened.update(folder=str(tmp_path), names=[])
    yield _opened["names"]
    _opened["folder"] = None


@pytest.fixture(scope="module")
def whole():
    torch.manual_seed(0)
    names = [f"model.{number}" for number in range(8)]
    return {name: torch.randn(NUM_SHARDS * ROWS, 6, 2) for name in names}


@pytest.fixture
def sharded(tmp_path, whole):
    """Write the shards and the index of 256 ranks, with tensors sharded by rows."""
    for rank in range(NUM_SHARDS):
        first = rank * ROWS
        chunks = {name: Chunk(tensor[first : first + ROWS], (first, 0, 0)) for name, tensor in whole.items()}
        write_shard(tmp_path / f"shard-{rank:05d}.safetensors", chunks)
    (tmp_path / INDEX).write_text(build_index(tmp_path))
    return tmp_path


def test_rank_opens_only_the_index_and_the_shards_it_needs(sharded, whole, opened):
    first = 100 * ROWS + 1
    parts = {name: Chunk(torch.zeros(2 * ROWS, 6, 2), (first, 0, 0)) for name in whole}
    read_index(sharded).fill(parts)
    for name, chunk in parts.items():
        assert chunk.local.equal(whole[name][first : first + 2 * ROWS])
    assert opened == [INDEX, *(f"shard-{rank:05d}.safetensors" for rank in (100, 101, 102))]


def test_whole_tensor_read_opens_each_shard_once(sharded, whole, opened):
    index = read_index(sharded)
    assert index.shape("model.3") == whole["model.3"].shape
    read = torch.zeros_like(whole["model.3"])
    index.fill({"model.3": Chunk(read, (0, 0, 0))})
    assert read.equal(whole["model.3"])
    assert len(opened) == 1 + NUM_SHARDS == len(set(opened))


def test_partial_reads_support_columns_dtypes_and_strides(sharded, whole, monkeypatch):
    monkeypatch.setattr("foundry.checkpoint.tensor_index._PIECE_BYTES", 100)  # Two rows at a time.
    index = read_index(sharded)
    read = torch.zeros(2, 3, 9, dtype=torch.bfloat16).permute(2, 1, 0)
    index.fill({"model.0": Chunk(read, (6, 2, 0))})
    assert read.equal(whole["model.0"][6:15, 2:5].bfloat16())


def test_read_beyond_the_stored_tensor_is_an_error(sharded):
    beyond = Chunk(torch.zeros(ROWS, 6, 2), (NUM_SHARDS * ROWS - 1, 0, 0))
    with pytest.raises(CheckpointError, match=r"has missing or duplicate parts of model\.0"):
        read_index(sharded).fill({"model.0": beyond})


def test_index_is_listed_in_the_manifest_and_optional(tmp_path):
    model, other, older = Net(1), Net(2), Net(3)
    folder = write(tmp_path, 3, model)
    assert INDEX in read_manifest(folder).files
    load_weights(folder, other)
    assert_same(other.state_dict(), model.state_dict())
    files = json.loads((folder / "manifest.json").read_text())["files"]
    del files[INDEX]
    (folder / INDEX).unlink()
    rewrite_manifest(folder, files=files)
    assert problems(folder) == []
    load_weights(folder, older)
    assert_same(older.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '["model.table"]',
        '{"model.table": 1}',
        '{"model.table": ["F32", [["../../secret", 0, [0], [5]]]]}',
        '{"model.table": ["F32", [["shard-00000.safetensors", 0, [0], [1000000000000]]]]}',
        '{"model.table": ["F32", [["shard-00000.safetensors", -8, [0], [5]]]]}',
        '{"model.table": ["F32", [["shard-00000.safetensors", "8", [0], [5]]]]}',
        '{"model.table": ["F99", [["shard-00000.safetensors", 8, [0], [5]]]]}',
    ],
)
def test_invalid_tensor_index_is_a_one_line_error(tmp_path, content):
    folder = write(tmp_path, 3, Net(1))
    model = torch.nn.Module()
    model.register_buffer("table", torch.zeros(5))
    (folder / INDEX).write_text(content)
    with pytest.raises(CheckpointError) as caught:
        load_weights(folder, model)
    assert "\n" not in str(caught.value)


REWRITTEN = {
    "another order": lambda tensors, info: ({"A": torch.zeros(2), **tensors}, info),
    "another type": lambda tensors, info: ({name: t.bfloat16() for name, t in tensors.items()}, info),
    "another type of the same size": lambda tensors, info: ({n: t.view(torch.int32) for n, t in tensors.items()}, info),
    "another shape": lambda tensors, info: ({name: t.mT.contiguous() for name, t in tensors.items()}, info),
    "without offsets": lambda tensors, info: (tensors, {}),
    "fewer tensors": lambda tensors, info: ({"b": tensors["b"]}, info),
    "another name": lambda tensors, info: ({f"{name}_": t for name, t in tensors.items()}, info),
    "more metadata": lambda tensors, info: (tensors, {**info, "note": "written by another program"}),
}


@pytest.mark.parametrize("rewrite", REWRITTEN.values(), ids=REWRITTEN)
def test_shard_that_disagrees_with_the_index_is_refused(tmp_path, rewrite):
    tensors = {"a": torch.randn(4, 3), "b": torch.randn(4, 90)}
    shard = tmp_path / "shard-00000.safetensors"
    write_shard(shard, {name: Chunk(tensor, (4, 0)) for name, tensor in tensors.items()})
    write_shard(tmp_path / "shard-00001.safetensors", {name: Chunk(tensor, (0, 0)) for name, tensor in tensors.items()})
    (tmp_path / INDEX).write_text(build_index(tmp_path))
    targets = {name: Chunk(torch.zeros(8, tensor.shape[1]), (0, 0)) for name, tensor in tensors.items()}
    read_index(tmp_path).fill(targets)
    assert all(chunk.local.equal(torch.cat([tensors[name]] * 2)) for name, chunk in targets.items())
    with safe_open(shard, framework="pt") as opened:
        changed, metadata = rewrite(tensors, opened.metadata())
    save_file(changed, shard, metadata)
    with pytest.raises(CheckpointError, match=r"tensors\.json lists a as F32 \[4, 3\] .*shard-00000\.safetensors"):
        read_index(tmp_path).fill({"a": targets["a"]})


@pytest.mark.parametrize(
    "header",
    [b"", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}}',
     b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
     b'{"a": {"dtype": "F32", "shape": ["1"], "data_offsets": [0, 4]}}', b"[" * 100_000],
)  # fmt: skip
def test_unreadable_shard_header_is_an_error(tmp_path, header):
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"a\.safetensors has a header that cannot be read"):
        build_index(tmp_path)
