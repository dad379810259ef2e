"""Megatron's schedules, batch sizes and checkpoints, number for number: every case of `goldens/`, or of the folder that
the environment variable FOUNDRY_GOLDENS names."""

import pytest
from golden_cases import FOLDER, cases
from golden_checks import CHECKS
from golden_differences import differences_of
from golden_instead import INSTEAD


@pytest.mark.parametrize("case", cases(), ids=[case["id"] for case in cases()])
def test_golden(case):
    if case["kind"] not in CHECKS:
        pytest.skip(f"{case['kind']!r} is none of the kinds known here: {', '.join(CHECKS)}")
    names = differences_of(case)
    (INSTEAD[names[0]] if names else CHECKS[case["kind"]])(case)


def test_there_are_cases():
    assert cases(), f"no list of cases in {FOLDER}"
