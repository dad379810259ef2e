"""`foundry.eval tasks=[...]`: a run and its export have the same lm_eval results."""

import importlib.util
import json

import pytest
from support.composition import configure
from support.evaluated import evaluate
from support.tiny import SMALL_LM

from foundry.commands.export import ExportOptions, export
from foundry.commands.task_eval import table
from foundry.config.packages import pip_command
from foundry.core.errors import ConfigError
from foundry.engine.train import train

has_lm_eval = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="no lm_eval")
COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
doc_to_text: "{{{{question}}}} ="
metadata: {{version: 1.0}}
"""
SUMS = """task: sums
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean}, {metric: acc_norm, aggregation: mean}]
"""
SAY = """task: say
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["5"], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match, aggregation: mean}]
filter_list: [{name: all, filter: [{function: take_first}]}]
"""


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    (folder / "text.txt").write_text("1 + 1 = 2, 2 + 2 = 4, 3 + 3 = 6.\n" * 200)
    text = ["data=text", f"data.path={folder / 'text.txt'}", "data.vocab_size=300", "precision=fp32"]
    config = configure(*SMALL_LM, "tracking=none", "tracking.progress=false", *text, "hparams.max_steps=3")
    train(config, folder / "run")
    return folder / "run"


@pytest.fixture
def tasks(tmp_path):
    rows = [{"question": f"{n} + {n}", "choices": [f" {2 * n}", f" {n}9", f" {n}"], "answer": 0} for n in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = COMMON.format(rows=tmp_path / "rows.jsonl")
    (tmp_path / "tasks").mkdir()
    for name, text in {"sums": SUMS, "say": SAY}.items():
        (tmp_path / "tasks" / f"{name}.yaml").write_text(text + common)
    return tmp_path / "tasks"


@has_lm_eval
@pytest.mark.long
def test_eval_tasks_of_a_run_match_lm_eval_on_its_export(run_dir, tasks, tmp_path, capsys):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    options = {"run": str(run_dir), "out": str(tmp_path / "own.json"), "max_samples": 8}
    measured = evaluate(**options, tasks=[str(tasks)], trust=True)
    printed = capsys.readouterr().out
    assert json.loads((tmp_path / "own.json").read_text()) == measured
    assert printed.endswith(f"{table(measured['tasks'])}\n{tmp_path / 'own.json'}\n")
    assert set(measured["tasks"]) == {"say", "sums"}
    assert (measured["checkpoint"], measured["tasks"]["sums"]["num_samples"]) == ("step_00000003", 8)

    export(ExportOptions(run=str(run_dir), out=str(tmp_path / "hf")))
    theirs = simple_evaluate(
        "hf",
        f"pretrained={tmp_path / 'hf'}",
        ["say", "sums"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        device="cpu",
        limit=8,
    )["results"]
    for name, keys in {"sums": ("acc", "acc_norm", "acc_stderr"), "say": ("exact_match",)}.items():
        for key in keys:
            mark = ",all" if name == "say" else ",none"
            own = measured["tasks"][name]["metrics"]
            assert own[key + mark if name == "say" else key] == theirs[name][key + mark]

    folder = {"run": str(tmp_path / "hf"), "trust": True}
    again = evaluate(**options | folder, tasks=[str(tasks / "sums.yaml")])
    assert again["tasks"] == {"sums": measured["tasks"]["sums"]}, "the folder is measured as it is"
    assert not list(run_dir.glob("*eval*")), "out says where to write"


@has_lm_eval
@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["TASKS/sumz.yaml"], "tasks: has .*sumz.yaml, which does not exist"),
        pytest.param(
            ["arc_esy"],
            r"tasks: has arc_esy, which is neither a folder nor a task of lm_eval; did you mean \w+",
            marks=pytest.mark.long,
        ),
        (["."], r"tasks: has \., a folder without a YAML file that defines a task"),
        ([], "tasks: is empty; name tasks of lm_eval"),
        (["TASKS/lost.yaml"], r"tasks: .*lost.yaml cannot be read: \w+"),
    ],
)
def test_eval_tasks_refuses_unknown_or_unreadable_tasks(run_dir, tasks, tmp_path, monkeypatch, names, message):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tasks / "lost.yaml").write_text(SUMS + COMMON.format(rows=tmp_path / "nowhere.jsonl"))
    names = [name.replace("TASKS", str(tasks)) for name in names]
    with pytest.raises(ConfigError, match=message):
        evaluate(run=str(run_dir), tasks=names, trust=True)
    assert not (run_dir / "eval_tasks.json").exists()


@has_lm_eval
def test_task_files_run_no_code_without_trust(run_dir, tasks, tmp_path):
    (tasks / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (tasks / "sums.yaml").write_text(f"{SUMS}doc_to_text: !function own.text\n")
    for name in (tasks, tasks / "sums.yaml"):
        with pytest.raises(
            ConfigError, match=f"tasks: has {name}, whose functions and .* if you trust its author, add trust=true"
        ):
            evaluate(run=str(run_dir), tasks=[str(name)])
    assert not (tmp_path / "ran").exists()


def test_eval_tasks_refuses_conflicting_options(run_dir, monkeypatch):
    def refused(overrides=(), **options):
        with pytest.raises(ConfigError) as error:
            evaluate(overrides, run=str(run_dir), **options)
        return str(error.value)

    assert refused(num_fewshot=2).startswith("num_fewshot: is 2 but belongs to the evaluation with tasks ")
    assert refused(tasks=["x"], max_new_tokens=9).startswith(
        "max_new_tokens: is 9 but belongs to the evaluation on data"
    )
    assert refused(["data=text"], tasks=["x"]).startswith("data: is text but belongs to the evaluation on data, ")
    monkeypatch.setattr("foundry.commands.task_eval.find_spec", lambda name: None)
    said = f"tasks: needs lm_eval, which is not installed; {pip_command('lm_eval', 'lm_eval')}"
    assert refused(tasks=["x"]) == said


def test_task_table_has_one_metric_per_line():
    metrics = {"acc": 0.5, "acc_stderr": 0.125, "exact_match,strict": 1.0}
    tasks = {"sums": {"num_samples": 8, "num_fewshot": 0, "version": 1.0, "metrics": metrics}}
    tasks["group"] = {"num_samples": None, "num_fewshot": None, "version": None, "metrics": {"acc": 0.25}}
    assert table(tasks).splitlines() == [
        "task   samples  shots  metric              value   stderr",
        "sums   8        0      acc                 0.5000  0.1250",
        "sums   8        0      exact_match,strict  1.0000",
        "group                  acc                 0.2500",
    ]
