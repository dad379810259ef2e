import os
import pickle
import resource

import pytest
import torch
from support.harness import spawn

from foundry.parallel.flight_recorder import dump_collectives, dump_into, record_collectives

VARIABLES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT")
FILES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


@pytest.fixture
def variables(monkeypatch):
    for name in (*VARIABLES, *FILES):
        monkeypatch.setenv(name, "")  # so that it is as it was afterwards, whatever sets it
        monkeypatch.delenv(name)
    return monkeypatch


def test_what_the_user_has_set_stays(variables, tmp_path):
    record_collectives()
    # Of the older name torch says that it is deprecated.
    assert [os.environ.get(name) for name in VARIABLES] == ["2000", None, "1"]
    variables.delenv("TORCH_FR_BUFFER_SIZE")
    variables.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    record_collectives()
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"


def test_nccl_writes_into_the_run_directory_where_nothing_else_is_said(variables, tmp_path):
    dump_into(tmp_path, torch.device("cpu"))
    assert not list(tmp_path.iterdir())  # there is no NCCL without a GPU
    dump_into(tmp_path, torch.device("cuda"))
    assert [os.environ.get(name) for name in FILES] == [str(tmp_path / "flight_recorder" / "rank_"), None]
    assert (tmp_path / "flight_recorder").is_dir()


def reduce_and_dump(world, folder):
    for _ in range(3 + world.rank):  # so that one is behind
        work = torch.distributed.all_reduce(torch.ones(5), async_op=True)
    dump_collectives(folder, world.rank, world.device)
    if world.rank == 0:
        torch.distributed.all_reduce(torch.ones(5))
    work.wait()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.mark.long
@pytest.mark.distributed
def test_the_ranks_files_say_which_collectives_each_has_begun(tmp_path):
    for soft, hard in spawn(reduce_and_dump, 2, tmp_path):
        assert soft == hard
    begun = []
    for rank in range(2):
        record = pickle.loads((tmp_path / "flight_recorder" / f"rank_{rank}").read_bytes())  # written just now
        begun.append([entry["input_sizes"] for entry in record["entries"]].count([[5]]))
    assert begun == [3, 4]
