"""Schedules, batch sizes and checkpoints of Megatron, number for number except for deliberate differences: every case
of `goldens/`, or of the folder in the environment variable FOUNDRY_GOLDENS.
"""

import pytest
from golden_cases import FOLDER, cases
from golden_checks import CHECKS
from golden_differences import differences_of
from golden_instead import INSTEAD


@pytest.mark.parametrize("case", cases(), ids=[case["id"] for case in cases()])
def test_megatron_case_matches_the_recorded_numbers(case):
    if case["kind"] not in CHECKS:
        pytest.skip(f"{case['kind']!r} is an unknown kind; known: {', '.join(CHECKS)}")
    names = differences_of(case)
    (INSTEAD[names[0]] if names else CHECKS[case["kind"]])(case)


def test_golden_folder_has_cases():
    assert cases(), f"no list of cases in {FOLDER}"
