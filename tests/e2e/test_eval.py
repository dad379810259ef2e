"""`foundry.eval` of runs and of transformers folders, and `foundry.sample` of chats."""

import json
import math
import shutil

import pytest
from support.composition import configure
from support.evaluated import evaluate
from support.samples import read_samples
from support.tiny import SMALL_LM, TINY_DIT

from foundry.commands.export import ExportOptions, export
from foundry.commands.sample import SampleOptions, sample
from foundry.core.errors import ConfigError
from foundry.engine.train import train

QUIET = ["tracking=none", "tracking.progress=false", "evaluation.write_samples=false"]
EXACT = "+evaluation.evaluators.exact_match={_target_: foundry.evaluators.exact_match.ExactMatch, max_new_tokens: 8}"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with the runs `base` (on text) and `sft` (on chats), and with their data."""
    folder = tmp_path_factory.mktemp("runs")
    chats = folder / "chats.jsonl"
    rows = [{"prompt": f"Count {number}", "completion": f"It is {number % 3}."} for number in range(40)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text("Count the dogs that run. It is 1, it is 2.\n" * 200)
    text = ["data=text", f"data.path={folder / 'text.txt'}", "data.vocab_size=300"]
    train(configure(*SMALL_LM, *QUIET, *text, "hparams.max_steps=2"), folder / "base")
    tuned = ["model=base", f"model.path={folder / 'base'}", "data=chats", f"data.path={chats}", "data.seq_len=32"]
    judged = [EXACT, "evaluation.metric=val_exact_match", "evaluation.direction=maximize"]
    train(configure("debug=fast", *QUIET, *tuned, "objective=sft", *judged, "hparams.max_steps=3"), folder / "sft")
    return folder


def result_of(run_dir):
    return json.loads((run_dir / "result.json").read_text())


@pytest.mark.parametrize("name", ["base", "sft"])
def test_eval_reproduces_the_metrics_of_the_run(runs, name, capsys):
    measured = evaluate(run=str(runs / name), ema=False)
    result = result_of(runs / name)
    assert measured["loss"] == pytest.approx(result["val_loss"], rel=1e-6)
    assert measured["perplexity"] == pytest.approx(math.exp(measured["loss"]))
    assert ("exact_match" in measured) == (name == "sft")
    if name == "sft":
        assert measured["exact_match"] == result["val_exact_match"]
        assert measured["ended"] == result["val_ended"]
        assert measured["num_prompts"] == measured["num_samples"] == 2
    assert json.loads((runs / name / "eval.json").read_text()) == measured
    printed = capsys.readouterr().out
    assert f"loss           {measured['loss']:.6g}\n" in printed
    assert printed.endswith(f"{runs / name / 'eval.json'}\n")


def test_eval_of_a_mean_squared_error_has_no_perplexity(tmp_path):
    train(configure(*TINY_DIT, *QUIET, "hparams.max_steps=1"), tmp_path / "run")
    measured = evaluate(run=str(tmp_path / "run"))
    assert measured["loss"] > 0
    assert "perplexity" not in measured


def test_eval_needs_no_base_and_accepts_other_data(runs, tmp_path):
    moved = shutil.copytree(runs / "sft", tmp_path / "sft", symlinks=True)
    settings = (moved / "config.yaml").read_text()
    (moved / "config.yaml").write_text(settings.replace(str(runs / "base"), "/nowhere"))
    before = evaluate(run=str(runs / "sft"))
    assert evaluate(run=str(moved), out=str(tmp_path / "own.json")) == before
    other = ["data=chats", f"data.path={runs / 'chats.jsonl'}", "data.seq_len=32", "data.held_out=0.25"]
    assert evaluate(other, run=str(moved), max_samples=7)["num_prompts"] == 7
    on_text = ["data=text", f"data.path={runs / 'text.txt'}", "data.seq_len=32", "objective=next_token"]
    assert "exact_match" not in evaluate(on_text, run=str(moved))


def test_eval_with_an_environment_scores_the_completions_of_an_sft_run(runs):
    plain = evaluate(run=str(runs / "sft"))
    scored = ["environment=exact_match", "environment.pattern='It is (.*)'", "+environment.weights.format=0.5"]
    measured = evaluate(scored, run=str(runs / "sft"), max_new_tokens=8)
    assert plain.items() <= measured.items()
    assert measured["reward_missing"] == 0.0
    assert measured["reward"] == measured["reward_correct"] + 0.5 * measured["reward_format"]


def test_eval_of_an_exported_folder_matches_eval_of_its_run(runs, tmp_path):
    export(ExportOptions(run=str(runs / "sft"), out=str(tmp_path / "hf")))
    with pytest.raises(ConfigError, match=r"^data: is required: the transformers folder .* names no data"):
        evaluate(run=str(tmp_path / "hf"))
    data = ["data=chats", f"data.path={runs / 'chats.jsonl'}", "data.seq_len=32", "objective=sft"]
    measured = evaluate(data, run=str(tmp_path / "hf"))
    was = evaluate(run=str(runs / "sft"))
    assert measured["loss"] == pytest.approx(was["loss"], rel=2e-3)  # bf16, transformers' implementation
    assert measured["num_prompts"] == was["num_prompts"]


@pytest.mark.parametrize(
    ("options", "overrides", "message"),
    [
        ({"run": "nowhere"}, [], "run: nowhere is not a run directory: it has no config.yaml"),
        ({"which": "best", "run": "BASE/checkpoints"}, [], "run: BASE/checkpoints is not a run directory"),
        ({"which": "77"}, [], "which: BASE has no checkpoint '77'; available: step_"),
        ({}, ["data=chats", "data.seq_len=32"], "data.path: has no value"),
        (
            {"record": "films"},
            [],
            "record: is films but belongs to the evaluation of policies in a simulator, and BASE uses",
        ),
        (
            {"against": "BASE"},
            ["data=digits"],
            "against: is BASE but belongs to the evaluation of policies in a simulator",
        ),
        ({}, ["data=digits"], "model: is Transformer, which needs tokens, but data is Digits"),
        ({}, ["data=text", "data.path=TEXT", "data.seq_len=64"], "data.seq_len: is 64 but the model of model.path="),
    ],
)
def test_eval_refuses_wrong_options_with_a_message(runs, options, overrides, message):
    def meant(text):
        return text.replace("BASE", str(runs / "base")).replace("TEXT", str(runs / "text.txt"))

    given = {"run": "BASE"} | options
    with pytest.raises(ConfigError) as refused:
        evaluate([meant(o) for o in overrides], **{name: meant(value) for name, value in given.items()})
    assert str(refused.value).startswith(meant(message))


def test_sample_applies_the_chat_template_and_refuses_wrong_options(runs, tmp_path, capsys):
    options = {"run": str(runs / "sft"), "max_new_tokens": 5}
    [one] = read_samples(sample(SampleOptions(**options, prompt="Count 7", out=str(tmp_path / "one"))))
    assert one.startswith("user: Count 7\nassistant: ")
    [plain] = read_samples(sample(SampleOptions(**options, prompt="Count 7", chat=False, out=str(tmp_path / "plain"))))
    assert plain.startswith("Count 7")
    two = sample(SampleOptions(**options, prompts=["Count 7", "Count 8"], temperature=0, out=str(tmp_path / "two")))
    again = sample(SampleOptions(**options, prompt="Count 8", temperature=0, out=str(tmp_path / "again")))
    assert read_samples(two)[1:] == read_samples(again)
    for wrong, message in (
        ({}, "prompt: has no value"),
        ({"prompt": "x", "prompts": ["y"]}, "prompt: is set together with prompts"),
        ({"prompts": []}, "prompts: is empty"),
        ({"prompt": "x", "stop": ["no token"]}, "stop: has 'no token', which is not a token"),
        ({"prompt": "x", "labels": [1]}, "labels: is not an option of objective SFT"),
    ):
        with pytest.raises(ConfigError) as refused:
            sample(SampleOptions(**options, **wrong))
        assert str(refused.value).startswith(message)
