"""The reward of answers is nan if the environment scores none of them."""

import math
from dataclasses import replace

import pytest
from support.contexts import evaluation_context
from support.rollout_parts import Vowels, make_data, make_model

from foundry.evaluators.exact_match import ExactMatch
from foundry.tasks.post_training.environments.judge import Judge


class Silent:
    """An environment that cannot score any answer."""

    def score(self, answers):
        return [{"vowels": None} for _ in answers]


@pytest.mark.parametrize("scores", [None, ("vowels",)])
@pytest.mark.parametrize("environment", [Vowels(), Silent()])
def test_reward_without_any_scored_answer_is_nan_and_not_omitted(environment, scores, caplog, tmp_path):
    data = make_data()
    evaluator = ExactMatch(
        data=replace(data, prompts=data.train_prompts),
        judge=Judge(environment, weights={"vowels": 2.0}, name="Mine", scores=scores),
        max_new_tokens=4,
    )
    found = evaluator.evaluate(make_model(), evaluation_context(tmp_path))
    if isinstance(environment, Vowels):
        assert found["reward"] == pytest.approx(2 * found["reward_vowels"])
        assert (found["reward_missing"], caplog.messages) == (0, [])
    else:
        assert math.isnan(found["reward"])
        assert found["reward_missing"] == 1
        assert caplog.messages == ["environment Mine gave no reward for any held-out answer"]
