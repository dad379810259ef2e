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
        monkeypatch.setenv(name, "")  # monkeypatch restores the variable after the test.
        monkeypatch.delenv(name)
    return monkeypatch


def test_flight_recorder_variables_of_the_user_are_kept(variables, tmp_path):
    record_collectives()
    # The older name stays unset: torch warns that it is deprecated.
    assert [os.environ.get(name) for name in VARIABLES] == ["2000", None, "1"]
    variables.delenv("TORCH_FR_BUFFER_SIZE")
    variables.setenv("TORCH_NCCL_TRACE_BUFFER_SIZE", "7")
    record_collectives()
    assert "TORCH_FR_BUFFER_SIZE" not in os.environ
    assert os.environ["TORCH_NCCL_TRACE_BUFFER_SIZE"] == "7"


def test_flight_recorder_dumps_into_the_run_directory_by_default(variables, tmp_path):
    dump_into(tmp_path, torch.device("cpu"))
    assert not list(tmp_path.iterdir())  # Without a GPU there is no NCCL.
    dump_into(tmp_path, torch.device("cuda"))
    assert [os.environ.get(name) for name in FILES] == [str(tmp_path / "flight_recorder" / "rank_"), None]
    assert (tmp_path / "flight_recorder").is_dir()


def reduce_and_dump(world, folder):
    for _ in range(3 + world.rank):  # Rank 0 begins one collective less than rank 1.
        work = torch.distributed.all_reduce(torch.ones(5), async_op=True)
    dump_collectives(folder, world.rank, world.device)
    if world.rank == 0:
        torch.distributed.all_reduce(torch.ones(5))
    work.wait()
    return resource.getrlimit(resource.RLIMIT_NOFILE)


@pytest.mark.long
@pytest.mark.distributed
def test_flight_recorder_files_list_the_collectives_of_each_rank(tmp_path):
    for soft, hard in spawn(reduce_and_dump, 2, tmp_path):
        assert soft == hard
    begun = []
    for rank in range(2):
        record = pickle.loads((tmp_path / "flight_recorder" / f"rank_{rank}").read_bytes())  # Written by this test.
        begun.append([entry["input_sizes"] for entry in record["entries"]].count([[5]]))
    assert begun == [3, 4]
