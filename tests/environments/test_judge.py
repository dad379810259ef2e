"""Rewards, whatever an environment does."""

import logging
import sys

import pytest
from composition import configure

from foundry.config.errors import ConfigError
from foundry.environments.judge import build_judge
from foundry.environments.protocol import Answer

OWN = """
import os
import time


class Length:
    def __init__(self, *, unit=1):
        self.unit = unit

    def score(self, answers):
        (answer,) = answers
        print("what is printed disturbs nobody")
        match answer.text:
            case "raise":
                raise ValueError("no judge\\nat home")
            case "hang":
                time.sleep(60)
            case "die":
                os._exit(3)
            case "nan":
                return [{"length": float("nan")}]
            case "none":
                return [{"length": None, "fits": 1}]
            case "odd":
                return 7
        return [{"length": len(answer.text) / self.unit, "fits": len(answer.text) < answer.columns["most"]}]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "lengths.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    return "lengths.Length"


def test_whatever_an_own_environment_does_the_others_are_scored(own, caplog):
    node = {"_target_": own, "unit": 2, "weights": {"fits": 0.5}, "timeout_seconds": 1.0}
    judge = build_judge(node)
    texts = ["four", "raise", "hang", "four", "die", "nan", "none", "odd", "sixsix"]
    with caplog.at_level(logging.WARNING):
        found = judge.judge([Answer(text, prompt="how long?", columns={"most": 5}) for text in texts])
    judge.close()
    assert [one.reward for one in found] == [2.5, None, None, 2.5, None, None, None, None, 3.0]
    assert [one.fault for one in found] == ["", "raised", "timed_out", "", "died", "no_number", "", "raised", ""]
    assert found[1].message == "ValueError: no judge at home"
    assert found[2].message == "took longer than environment.timeout_seconds=1"
    assert "ended with exit code 3" in found[4].message
    assert found[6].scores == {"fits": 1.0}
    assert "score(answers) returned 7 for one answer" in found[7].message
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("environment Length: ValueError: no judge at home, at the answer raise to how long?")


def test_an_environment_that_cannot_be_built_is_a_line(own):
    with pytest.raises(ConfigError, match=r"^environment\._target_: is lengths\.Length, which cannot be built: Type"):
        build_judge({"_target_": own, "units": 2})


def test_built_in_environments_are_chosen_and_weighted():
    judge = build_judge(configure("environment=arithmetic").environment)
    (found,) = judge.judge([Answer("Answer: 12", columns={"answer": "12"})])
    assert found.reward == pytest.approx(1.1)
    assert judge.scores == ("correct", "format")
    python = build_judge(configure("environment=python", "environment.timeout_seconds=30").environment)
    assert [one.reward for one in python.judge([Answer("x = 1"), Answer("x =")])] == [1.0, 0.0]
    python.close()
    assert build_judge(configure().environment) is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment=format"], "environment.pattern: has no value"),
        (["environment=format", "environment.pattern='('"], "environment.pattern: is '(', which is no regular"),
        (["environment=arithmetic", "+environment.weights.corect=2"], "environment.weights.corect: is no score of"),
        (["environment=python", "environment.timeout_seconds=0"], "environment.timeout_seconds: is 0"),
    ],
)
def test_settings_that_are_wrong(overrides, message):
    with pytest.raises(ConfigError) as caught:
        configure(*overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize("option", ["format", "exact_match", "multiple_choice"])
def test_a_pattern_that_never_ends_costs_its_answer_alone(option):
    node = configure(
        f"environment={option}", "environment.pattern='(a+)+$'", "environment.timeout_seconds=0.5"
    ).environment
    judge = build_judge(node)
    texts = ["a" * 60 + "!", "aa"]
    found = judge.judge([Answer(text, prompt="", columns={"answer": "aa"}) for text in texts])
    judge.close()
    assert [one.fault for one in found] == ["timed_out", ""]
