"""docs/draw_schedules.py draws every schedule picture of the pages."""

import re

import pytest
from support.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def script():
    return load_script("draw_schedules")


@pytest.mark.long
def test_draw_schedules_draws_every_picture_of_the_pages(script, tmp_path):
    script.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    text = "".join((ROOT / "docs" / page).read_text() for page in ("numerics.md", "plan.md"))
    assert drawn == set(re.findall(r"\]\(images/(\w+\.png)\)", text))
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (script.IMAGES / name).is_file()


def test_drawn_batch_ramp_has_the_documented_final_rates(script):
    _, right = script.batch_sizes().axes
    by_steps, own = (line.get_ydata() for line in right.lines)
    assert (own[9], own[79], own[-1]) == (1, 1, 0)
    assert (by_steps[9], by_steps[19], by_steps[-1]) == (0.5, 1, 0.5)
