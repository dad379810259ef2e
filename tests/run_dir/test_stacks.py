import os

import pytest

from foundry.run_dir.ends import dump_stacks, read_positions


def test_stacks_are_of_this_moment(tmp_path):
    for _ in range(2):
        dump_stacks(tmp_path, 3, 7, "training")
    (file,) = (tmp_path / "stacks").iterdir()
    assert file.name == "rank-00003.txt"
    assert file.read_text().startswith("step 7, training\n")
    assert file.read_text().count("in test_stacks_are_of_this_moment") == 1


def test_positions_include_only_recently_written_ranks(tmp_path):
    for rank, activity in enumerate(["training", "reading samples", "saving a checkpoint"]):
        dump_stacks(tmp_path, rank, 5 + rank, activity)
    (tmp_path / "stacks" / "rank-00003.txt").write_text("not a position")
    written = (tmp_path / "stacks" / "rank-00000.txt").stat().st_mtime
    os.utime(tmp_path / "stacks" / "rank-00001.txt", (written - 9, written - 9))
    os.utime(tmp_path / "stacks" / "rank-00002.txt", (written - 11, written - 11))  # written before a restart
    positions = read_positions(tmp_path, 0, 5, seconds=10.0)
    assert positions == {0: (5, "training"), 1: (6, "reading samples")}


@pytest.mark.parametrize("is_there", [True, False])
def test_positions_require_a_file_of_this_rank(tmp_path, is_there):
    dump_stacks(tmp_path, 1, 5, "training")
    if is_there:
        dump_stacks(tmp_path, 0, 5, "training")
    assert (read_positions(tmp_path, 0, 2, seconds=10.0) is not None) == is_there
