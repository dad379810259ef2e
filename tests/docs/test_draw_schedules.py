"""docs/draw_schedules.py draws every picture that the pages show of schedules."""

import re

import pytest
from support.scripts import ROOT, load_script


@pytest.fixture(scope="module")
def script():
    return load_script("draw_schedules")


@pytest.mark.long
def test_it_draws_what_the_pages_show(script, tmp_path):
    script.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    text = "".join((ROOT / "docs" / page).read_text() for page in ("numerics.md", "plan.md"))
    assert drawn == set(re.findall(r"\]\(images/(\w+\.png)\)", text))
    for name in drawn:
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert (script.IMAGES / name).is_file()


def test_the_ramped_run_ends_where_the_page_says(script):
    _, right = script.batch_sizes().axes
    by_steps, own = (line.get_ydata() for line in right.lines)
    assert (own[9], own[79], own[-1]) == (1, 1, 0)
    assert (by_steps[9], by_steps[19], by_steps[-1]) == (0.5, 1, 0.5)
