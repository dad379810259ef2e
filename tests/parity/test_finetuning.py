"""The numbers of fine-tuning as other systems compute them: every case of foundry's own files and of FOUNDRY_GOLDENS.

What a case is checked against and what foundry leaves out on purpose follows from its configuration, so that cases
that are not in the files can be run too.
"""

import pytest
from finetuning_cases import finetuning_cases, not_offered
from finetuning_checks import CHECKS


@pytest.mark.parametrize("case", finetuning_cases(), ids=[case["id"] for case in finetuning_cases()])
def test_golden(case):
    kind = case["id"].split("/")[0]
    if kind not in CHECKS:
        pytest.skip(f"{kind!r} is none of the kinds known here: {', '.join(CHECKS)}")
    if reason := not_offered(case):
        pytest.skip(f"not offered: {reason}")
    CHECKS[kind](case)


def test_there_are_cases_of_every_kind():
    assert {case["id"].split("/")[0] for case in finetuning_cases()} >= CHECKS.keys()
