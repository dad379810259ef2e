"""Fine-tuning numbers of other systems: all cases of the stored files and of FOUNDRY_GOLDENS.

The kind of a case, which begins its id, determines its check; kind and configuration determine whether foundry offers
it. So cases outside the files can be run too.
"""

import pytest
from finetuning_cases import COUNTS, OWN_FOLDER, finetuning_cases, known_settings, not_offered, read_cases
from finetuning_checks import CHECKS


@pytest.mark.parametrize("case", finetuning_cases(), ids=[case["id"] for case in finetuning_cases()])
def test_finetuning_case_matches_the_recorded_numbers(case):
    kind = case["id"].split("/")[0]
    if kind not in CHECKS:
        pytest.skip(f"{kind!r} is an unknown kind; known: {', '.join(CHECKS)}")
    if reason := not_offered(case):
        pytest.skip(f"not offered: {reason}")
    CHECKS[kind](case)


OWN_CASES = list(read_cases(OWN_FOLDER / "finetuning.json"))


@pytest.mark.parametrize("value", [False, None, "none", 0, 0.0, "", True, 1])
@pytest.mark.parametrize("kind", CHECKS)
def test_case_with_an_unknown_setting_is_not_compared(kind, value):
    case = next(case for case in OWN_CASES if case["id"].startswith(f"{kind}/") and not not_offered(case))
    config = case["config"] | {"unknown": value}
    assert not_offered(case | {"config": config}) == "settings that are not known here: unknown"


def test_every_setting_of_the_recorded_cases_is_known():
    for case in OWN_CASES:
        assert case["config"].keys() <= known_settings(case["id"].split("/")[0], case["config"]) | COUNTS, case["id"]


def test_finetuning_cases_cover_every_kind():
    assert {case["id"].split("/")[0] for case in finetuning_cases()} >= CHECKS.keys()
