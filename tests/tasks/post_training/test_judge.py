"""Rewards of environments, including faulty ones."""

import gc
import logging
import math
import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.composition import configure
from support.examples import some_of

from foundry.core.errors import ConfigError, as_text
from foundry.generation.scoring import Answer
from foundry.tasks.post_training.checks.environments import check_environment
from foundry.tasks.post_training.environments.judge import Judge, build_judge
from foundry.tasks.post_training.environments.worker import Worker
from foundry.tasks.post_training.objectives.advantages import group_advantages, mean_and_std

ANSWERED = "+evaluation.evaluators.exact_match._target_=foundry.evals.ExactMatch"
OWN = """
import os
import resource
import sys
import time


class Length:
    def __init__(self, *, unit=1):
        self.unit = unit

    def score(self, answers):
        assert len(answers) <= 4
        return [self._score(answer) for answer in answers]

    def _score(self, answer):
        print("printed text is discarded")
        match answer.text:
            case "raise":
                raise ValueError("no judge\\nat home")
            case "hang":
                time.sleep(60)
            case "die":
                os._exit(3)
            case "exit":
                sys.exit("no more")
            case "closed":
                os.closerange(0, 100)
                time.sleep(60)
            case "left":
                if os.fork():
                    os._exit(4)
                time.sleep(60)
            case "fork":
                os.fork()
            case "read":
                input()
            case "flood":
                for _ in range(1000):
                    print("x" * 1000)
            case "memory":
                resource.setrlimit(resource.RLIMIT_AS, (2**31, -1))
                bytearray(2**32)
            case "long":
                raise ValueError("x" * 10**6)
            case "nan":
                return {"length": float("nan")}
            case "huge":
                return {"length": 10**400}
            case "text":
                return {"length": "0.5"}
            case "none":
                return {"length": None, "fits": 1}
            case "odd":
                return 7
            case "half":
                raise ValueError("half \\ud800 of a pair")
            case "half name":
                return {"\\ud800": 1.0}
            case "write" | "forge" | "deep" | "end":
                written = {
                    "write": b"x\\n",
                    "forge": b'{"number": -1, "scores": [{"length": 9}]}\\n',
                    "deep": b"[" * 10**5 + b"\\n",
                    "end": b"x" * 10**4,
                }
                for number in range(3, 20):
                    try:
                        os.write(number, written[answer.text])
                    except OSError:
                        pass
        return {"length": len(answer.text) / self.unit, "fits": len(answer.text) < answer.columns["most"]}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "lengths.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return "lengths.Length"


FAULTS = {
    "raise": ("raised", "ValueError: no judge at home"),
    "hang": ("timed_out", "took longer than environment.timeout_seconds=2"),
    "die": ("died", "ended with exit code 3 in the environment's process"),
    "exit": ("raised", "SystemExit: no more"),
    "closed": ("died", "the connection was closed in the environment's process"),
    "left": ("died", "ended with exit code 4 in the environment's process"),
    "read": ("raised", "EOFError: EOF when reading a line"),
    "memory": ("raised", "MemoryError"),
    "nan": ("no_number", "scores length as nan"),
    "huge": ("raised", f"TypeError: score(answers) returned {as_text(10**400)} as length, not a number"),
    "text": ("raised", "TypeError: score(answers) returned 0.5 as length, not a number"),
    "odd": ("raised", "TypeError: score(answers) returned [7], not a list of one mapping from names to numbers"),
}
FAULTS |= {
    "half": ("raised", "ValueError: half \\ud800 of a pair"),
    "half name": ("raised", "TypeError: score(answers) returned the name \\ud800, which cannot be printed"),
}
SOUND = {"four": 2.5, "fork": 2.5, "flood": 2.5, "sixsix": 3.0}


@pytest.mark.long
@pytest.mark.parametrize("per_call", [4, 1])
def test_environment_faults_cost_only_their_own_answers(own, caplog, per_call):
    node = {"_target_": own, "unit": 2, "weights": {"fits": 0.5}, "timeout_seconds": 2.0, "answers_per_call": per_call}
    judge = build_judge(node)
    texts = [text for pair in zip(SOUND, FAULTS, strict=False) for text in pair] + list(FAULTS)[len(SOUND) :]
    texts += ["none", "long", *SOUND]
    with caplog.at_level(logging.WARNING):
        judged = judge.judge([Answer(text, prompt="how long?", columns={"most": 5}) for text in texts])
    judge.close()
    found = list(zip(texts, judged, strict=True))
    assert [one.reward for text, one in found if text in SOUND] == 2 * list(SOUND.values())
    assert {text: (one.fault, one.message) for text, one in found if text in FAULTS} == FAULTS
    assert [(one.reward, one.fault, one.scores) for text, one in found if text == "none"] == [(None, "", {"fits": 1.0})]
    assert [len(one.message) < 400 for text, one in found if text == "long"] == [True]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("environment Length: ValueError: no judge at home, for the answer raise to how long?")


@pytest.mark.parametrize("text", ["write", "forge", "deep", "end"])
def test_environment_that_corrupts_its_pipe_loses_only_that_answer(own, text):
    gc.collect()  # otherwise finalizers of earlier tests may run, and fail, at the recursion limit that "deep" reaches
    judge = build_judge({"_target_": own, "unit": 2, "timeout_seconds": 2.0})
    judged = judge.judge([Answer(each, columns={"most": 5}) for each in ("four", text, "four", "sixsix")])
    judge.close()
    assert [one.fault for one in judged] == ["", "died", "", ""]
    assert [one.reward for one in judged if not one.fault] == [3.0, 3.0, 3.0]
    assert judged[1].message.startswith("wrote into the connection of the environment's process (")
    assert judged[1].message.isprintable()


class Scorer:
    def __init__(self, values):
        self.values = values

    def score(self, answers):
        return [{"score": self.values[answer.text]} for answer in answers]


@settings(deadline=None)
@given(values=st.lists(st.floats() | st.sampled_from([1.3e154, -1.3e154, 1e300, 1e308]), min_size=2, max_size=8))
def test_rewards_have_a_finite_variance_or_count_as_missing(values):
    texts = {str(number): value for number, value in enumerate(values)}
    judged = Judge(Scorer(texts), weights={}, name="Scorer", answers_per_call=8).judge([*map(Answer, texts)])
    assert [one.reward is not None for one in judged] == [math.isfinite(value * value) for value in values]
    rewards = torch.tensor([math.nan if one.reward is None else one.reward for one in judged], dtype=torch.float64)
    scored = rewards[~rewards.isnan()]
    assert len(scored) < 2 or all(part.isfinite().all() for part in mean_and_std(scored[None]))
    assert group_advantages(rewards, torch.zeros(len(rewards))).advantage.isfinite().all()
    assert all(math.isfinite(value) for one in judged for value in one.scores.values())


def test_reward_too_large_to_square_is_warned_of_once(caplog):
    judge = Judge(Scorer({"a": 1e300, "b": 1e308, "c": 1.0}), weights={"score": 2.0}, name="Scorer")
    with caplog.at_level(logging.WARNING):
        assert [one.reward for one in judge.judge([*map(Answer, "abc")])] == [None, None, 2.0]
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith(
        "environment Scorer: scores score as 1e+300, whose square is not finite in float64, for the answer"
    )


@pytest.mark.long
def test_calls_to_an_environment_that_always_times_out_are_limited(own, monkeypatch):
    judge = build_judge({"_target_": own, "timeout_seconds": 0.2})
    with monkeypatch.context() as patched:
        starts = []
        start = Worker._start
        patched.setattr(Worker, "_start", lambda worker: (starts.append(worker), start(worker)))
        for _ in range(2):
            judged = judge.judge([Answer("hang")] * 30)
            assert [one.fault for one in judged] == ["timed_out"] * 30
    assert len(starts) == 8
    (one, other) = judge.judge([Answer("four", columns={"most": 5}), Answer("hang")])
    assert (one.reward, other.fault) == (5.0, "timed_out")
    judge.close()


def test_environment_that_cannot_be_built_is_a_config_error(own):
    with pytest.raises(ConfigError, match=r"^environment\._target_: is lengths\.Length, which cannot be built: Type"):
        build_judge({"_target_": own, "units": 2})


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("scores(self, answers)", "which has no method score(answers)"),
        ("score(self, answers, rewards)", "whose score(answers, rewards) does not accept a call of score(answers)"),
    ],
)
def test_environment_without_its_method_is_a_config_error(tmp_path, monkeypatch, method, problem):
    (tmp_path / "scoring.py").write_text(f"class Scorer:\n    def {method}:\n        return []\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError) as error:
        build_judge({"_target_": "scoring.Scorer"})
    assert str(error.value) == (
        "environment._target_: is scoring.Scorer, which cannot be built: TypeError: scoring.Scorer returns an object "
        f"of type Scorer, {problem}"
    )


def test_builtin_environments_are_selected_and_weighted():
    judge = build_judge(configure("environment=arithmetic", ANSWERED).environment)
    (found,) = judge.judge([Answer("Answer: 12", columns={"answer": "12"})])
    assert found.reward == pytest.approx(1.1)
    assert judge.scores == ("correct", "format")
    words = ["environment=python", "environment.timeout_seconds=30", "+environment.weights.parses=2.5"]
    python = build_judge(configure(*words, ANSWERED).environment)
    assert [one.reward for one in python.judge([Answer("x = 1"), Answer("x =")])] == [2.5, 0.0]
    python.close()
    assert build_judge(configure().environment) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment=format"], "environment.pattern: has no value"),
        (
            ["environment=format", "environment.pattern='('"],
            "environment.pattern: is '(', which is not a valid regular",
        ),
        (["environment=arithmetic", "+environment.weights.corect=2"], "environment.weights.corect: is not a score of"),
        (["environment=python", "environment.timeout_seconds=0"], "environment.timeout_seconds: is 0"),
        (["environment=python", "environment.timeout_seconds=600"], "is 600 but distributed.timeout_seconds=600 would"),
        (
            ["environment=arithmetic", "environment.weights.format=nan"],
            "environment.weights.format: is nan but must be",
        ),
        (["environment=arithmetic"], "environment: is set but nothing in this run generates completions; choose"),
    ],
)
def test_invalid_environment_settings_are_config_errors(overrides, message):
    with pytest.raises(ConfigError) as caught:
        configure(*overrides, *([] if message.startswith("environment: ") else [ANSWERED]))
    assert message in str(caught.value)


@pytest.mark.parametrize("option", some_of(["format", "exact_match", "multiple_choice"], "format"))
def test_catastrophic_regex_times_out_for_its_answer_only(option):
    node = configure(
        f"environment={option}", "environment.pattern='(a+)+$'", "environment.timeout_seconds=0.5", ANSWERED
    ).environment
    judge = build_judge(node)
    texts = ["a" * 60 + "!", "aa"]
    found = judge.judge([Answer(text, prompt="", columns={"answer": "aa"}) for text in texts])
    judge.close()
    assert [one.fault for one in found] == ["timed_out", ""]


@pytest.mark.parametrize(
    ("own_settings", "message"),
    [
        ({"timeout_seconds": "soon"}, "timeout_seconds: is soon but must be a number"),
        ({"timeout_seconds": -1}, "timeout_seconds: is -1 but must be above 0"),
        ({"timeout_seconds": 1e4}, "timeout_seconds: is 10000 but distributed.timeout_seconds=600 would end the run"),
        ({"answers_per_call": 1.5}, "answers_per_call: is 1.5 but must be a whole number"),
        ({"answers_per_call": 0}, "answers_per_call: is 0 but must be at least 1"),
        ({"weights": [1]}, "weights: is [1] but must be a mapping"),
        ({"weights": {"length": "much"}}, "weights.length: is much but must be a number"),
        ({"weights": {"length": math.inf}}, "weights.length: is inf but must be finite"),
        ({"weights": {"length": 2}, "timeout_seconds": 5, "answers_per_call": 64, "unit": "any"}, None),
    ],
)
def test_settings_of_a_custom_environment_are_checked(own_settings, message):
    config = replace(configure(ANSWERED), environment={"_target_": "lengths.Length", **own_settings})
    found = [str(violation).removeprefix("environment.") for violation in check_environment(config)]
    assert (found == []) if message is None else found[0].startswith(message)
