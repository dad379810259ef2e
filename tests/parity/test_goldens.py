"""Megatron's schedules, batch sizes and checkpoints, number for number: every case of `goldens/`, or of the folder that
the environment variable FOUNDRY_GOLDENS names."""

import pytest
from golden_cases import FOLDER, cases, is_own
from golden_checks import CHECKS
from golden_differences import DIFFERENCES, difference_of
from golden_instead import INSTEAD


@pytest.mark.parametrize("case", cases(), ids=[case["id"] for case in cases()])
def test_golden(case):
    if case["kind"] not in CHECKS:
        pytest.skip(f"{case['kind']!r} is none of the kinds known here: {', '.join(CHECKS)}")
    name = difference_of(case)
    (CHECKS[case["kind"]] if name is None else INSTEAD[name])(case)


def test_there_are_cases():
    assert cases(), f"no list of cases in {FOLDER}"


@pytest.mark.skipif(not is_own(), reason="other cases than foundry's own")
def test_differences_are_in_exactly_these_cases():
    found = {name: tuple(c["id"] for c in cases() if difference_of(c) == name) for name in DIFFERENCES}
    assert found == {name: difference.ids for name, difference in DIFFERENCES.items()}
    assert INSTEAD.keys() == DIFFERENCES.keys()
    assert len(cases()) == 130
