"""`python -m foundry.coordinates`: output, files and refusals."""

import json

import pytest
from support.tiny import TINY_DIT, TINY_LM

CHECK = ["hydra.run.dir=check", "widths=[16,32,64]", "coordinates.steps=2", "optimizer=adamw", "hparams.lr=1e-3"]


@pytest.mark.long
@pytest.mark.parametrize("run", [TINY_LM, TINY_DIT], ids=["decoder", "dit"])
def test_coordinate_check_writes_table_numbers_and_picture(run_command, lm, run):
    # The fixture lm fills the cache before, since filling it prints progress to stderr.
    overrides = [*run, *CHECK, "model.parametrization=mup", "model.base_width=16"]
    stdout, stderr = run_command(*overrides, module="foundry.coordinates")
    assert stderr == ""
    folder = run_command.cwd / "check"
    numbers = json.loads((folder / "coordinates.json").read_text())
    layers = ["embedding", "block 1", "block 2", "output"]
    assert list(numbers["layers"]) == layers
    for layer in numbers["layers"].values():
        assert [len(values) for values in layer["sizes"]] == [len(values) for values in layer["changes"]] == [3] * 3
        assert all(first == 0.0 and last > 0 for first, *_, last in layer["changes"])
    assert f"verdict  mup: {numbers['verdict']}\n" in stdout
    assert (folder / "coordinates.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in folder.iterdir()} - {".hydra", ".foundry"} == {
        "coordinates.json",
        "coordinates.png",
        "foundry.log",
    }


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["widths=[64]"],
            "coordinates.widths: is [64] but must be two or more ascending widths, such as [64,",
        ),
        (["widths=[64,32]"], "coordinates.widths: is [64,32] but must be two or more ascending widths"),
        (
            ["widths=[32,40]"],
            "coordinates.widths: has 40 but model.num_heads=2 at model.hidden_size=32 is no whole number at this "
            "width; choose multiples of 16\n",
        ),
        (["steps=0"], "coordinates.steps: is 0 but must be at least 1\n"),
        (["widht=[32,64]"], "widht: "),
        (
            ["distributed.nproc_per_node=2"],
            "distributed.nproc_per_node: is 2 but the coordinate check",
        ),
        (
            ["model=hf_gpt2"],
            "model: is HuggingFace, whose width cannot be varied; choose model=transformer or model=dit\n",
        ),
    ],
)
def test_coordinate_check_refuses_wrong_options_with_one_line(run_command, overrides, message):
    words = ["debug=fast", "tracking.plots=false", *(TINY_LM[1:7] if "model=hf_gpt2" not in overrides else [])]
    _, stderr = run_command(*words, *overrides, module="foundry.coordinates", code=2)
    assert stderr.startswith(message)
    assert stderr.count("\n") == 1
