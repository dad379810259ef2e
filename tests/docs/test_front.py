"""Pictures, badges and errors in the README match the output of foundry and setup.cfg."""

import re
import shlex
from html import unescape

import pytest
from support.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def script():
    return load_script("draw_front")


def test_front_picture_matches_the_output_of_its_command(script):
    kept, narrow = script.PICTURE.read_text(), script.NARROW.read_text()
    right = script.kept_curve()
    drawn = (script.picture(right), script.picture(right, is_narrow=True))
    assert drawn == (kept, narrow), "run python docs/draw_front.py"
    shown = " ".join(unescape(text) for text in re.findall(r"<text[^>]*>(.*?)</text>", kept))
    assert len(script.refusals()) == 3
    for refusal in script.refusals():
        assert refusal in shown


def test_badges_match_setup_cfg(script):
    drawn = script.badges()
    assert all((script.IMAGES / name).read_text() == text for name, text in drawn.items()), (
        "run python docs/draw_front.py"
    )
    readme = (ROOT / "README.md").read_text()
    for name, text in drawn.items():
        value = re.search(r"<title>\w+: (.*)</title>", text)[1]
        assert re.search(rf"!\[\w+: {value.replace('-', '.')}\]\(docs/images/{name}\)", readme)


def test_front_curve_is_drawn_from_recorded_metrics(script, tmp_path):
    lines = ['{"step": 1, "loss": 8.0}', '{"step": 10, "loss": 4.0}', '{"step": 10, "val_loss": 5.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    loss, held_out = script.read_losses(tmp_path)
    assert (loss, held_out) == ([(1, 8.0), (10, 4.0)], [(10, 5.0)])
    assert script.curve(loss, held_out).count("<circle") == 1


@pytest.mark.long
def test_errors_of_the_readme_match_the_output_of_its_command(run_command):
    """The two errors concern 400 jobs and 200 jobs of one sweep."""
    (block,) = re.findall(r"^```text\n(\$ foundry -m .*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    command, *expected = block.splitlines()
    _, stderr = run_command(*shlex.split(command.removeprefix("$ foundry ")), code=2)
    assert stderr.splitlines() == expected
