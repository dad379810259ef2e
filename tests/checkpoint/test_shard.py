"""safetensors and torch read shards like files that they wrote."""

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from foundry.checkpoint.shard import Chunk, HostCopies, own_chunks, write_shard

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16]
DTYPES += [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2]


def tensors():
    torch.manual_seed(0)
    made = {f"of.{dtype}": (torch.randn(3, 5) * 4).to(dtype) for dtype in DTYPES}
    return made | {"scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4), "transposed": torch.randn(4, 6).T}


def test_safetensors_reads_shards(tmp_path):
    made = tensors()
    facts = write_shard(tmp_path / "a.safetensors", own_chunks(made, rank=0, world_size=1))
    read = load_file(tmp_path / "a.safetensors")
    assert read.keys() == made.keys()
    for name, tensor in made.items():
        assert read[name].dtype == tensor.dtype
        ours, theirs = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, read[name]))
        assert torch.equal(ours, theirs), name
    content = (tmp_path / "a.safetensors").read_bytes()
    assert (facts.bytes, facts.checksum) == (len(content), xxhash.xxh3_128_hexdigest(content))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # Intended: the test has one process.
def test_torch_reads_shards_like_its_own_files(tmp_path):
    made = {name: tensor for name, tensor in tensors().items() if "float8" not in name}
    (tmp_path / "ours").mkdir()
    write_shard(tmp_path / "ours" / "a.safetensors", own_chunks(made, rank=0, world_size=1))
    contiguous = {name: tensor.contiguous() for name, tensor in made.items()}
    save(
        contiguous,
        storage_writer=HuggingFaceStorageWriter(str(tmp_path / "torch"), save_distributed=True),
        no_dist=True,
    )
    ours, theirs = (HuggingFaceStorageReader(str(tmp_path / name)) for name in ("ours", "torch"))
    assert ours.read_metadata().state_dict_metadata == theirs.read_metadata().state_dict_metadata
    read = {name: torch.zeros_like(tensor) for name, tensor in made.items()}
    load(read, storage_reader=ours, no_dist=True)
    assert all(torch.equal(read[name], made[name]) for name in made)


def test_replicated_tensors_are_written_once_and_divided_evenly():
    made = {f"t{size}": torch.zeros(size) for size in range(1, 101)}
    shares = [own_chunks(made, rank=rank, world_size=4) for rank in range(4)]
    assert sorted(name for share in shares for name in share) == sorted(made)
    sizes = [sum(chunk.local.numel() for chunk in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= 4


def test_unsupported_dtype_of_a_shard_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"a is torch\.complex64, which a \.safetensors file cannot store"):
        write_shard(tmp_path / "a", {"a": Chunk(torch.zeros(2, dtype=torch.complex64), (0,))})


def test_host_copies_reuse_memory_and_follow_shape_changes():
    copies, tensor = HostCopies(), torch.ones(3)
    first = copies.take({"a": Chunk(tensor, (0,))})["a"].local
    tensor.add_(1)
    assert first.tolist() == [1, 1, 1]
    second = copies.take({"a": Chunk(tensor, (0,))})["a"].local
    assert second.data_ptr() == first.data_ptr()
    assert copies.num_bytes == 12
    assert copies.take({"b": Chunk(torch.ones(2, 2), (0, 0))})["b"].local.shape == (2, 2)
    assert copies.num_bytes == 16


@pytest.mark.gpu
def test_host_copies_from_a_gpu_are_pinned_and_complete():
    tensor = torch.arange(2**24, device="cuda")
    copy = HostCopies().take({"a": Chunk(tensor, (0,))})["a"].local
    tensor.zero_()
    assert copy.is_pinned()
    assert torch.equal(copy, torch.arange(2**24))
