from foundry.run_dir.ends import dump_stacks


def test_stacks_are_of_this_moment(tmp_path):
    for _ in range(2):
        dump_stacks(tmp_path, 3)
    (file,) = (tmp_path / "stacks").iterdir()
    assert file.name == "rank-00003.txt"
    assert file.read_text().count("in test_stacks_are_of_this_moment") == 1
