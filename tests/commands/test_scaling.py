"""`foundry scaling`: arguments, output, files and errors."""

import json
import shutil

import pytest
from support.scaling_jobs import ALPHA, BETA, TOKENS, A, B, E, loss_of, write_job, write_jobs

from foundry.commands.scaling import ScalingOptions, fit_scaling_law, join_lists
from foundry.config.command import parse_options
from foundry.core.errors import ConfigError
from foundry.engine.restore import build_unfilled
from foundry.planning.parameter_counts import count_parameters


def run(*words):
    return fit_scaling_law(parse_options(ScalingOptions, join_lists([*words, "resamples=20"]))).facts


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A folder of jobs on a known law, and their N and D."""
    folder = tmp_path_factory.mktemp("jobs") / "sweep"
    return folder, write_jobs(folder)


@pytest.fixture
def copied(jobs, tmp_path):
    return shutil.copytree(jobs[0], tmp_path / "sweep")


def test_list_options_take_values_lists_and_repetitions():
    words = ["predict=N=30M D=600M", "dir=a", "predict=['N=1M D=2M',\"N=3\"]", "exclude=3", "exclude=hparams.lr=1e-2"]
    options = parse_options(ScalingOptions, join_lists([*words, "budgets=[1e15,2e16]", "budgets=3e17", "hold_out=2*"]))
    assert options.predict == ["N=30M D=600M", "N=1M D=2M", "N=3"]
    assert options.exclude == ["3", "hparams.lr=1e-2"]
    assert options.budgets == [1e15, 2e16, 3e17]
    assert (options.hold_out, options.dir) == (["2*"], "a")


def test_command_recovers_the_law_and_writes_its_files(copied, jobs, capsys):
    sizes = jobs[1]
    words = ["predict=N=30M D=600M", "budgets=[1e15,1e16]", "hold_out=11", "exclude=0"]
    facts = run(f"dir={copied}", *words)
    constants = {name: entry["value"] for name, entry in facts["law"]["constants"].items()}
    assert constants == pytest.approx({"E": E, "A": A, "alpha": ALPHA, "B": B, "beta": BETA}, rel=1e-3)
    (held_out,) = facts["held_out"]
    assert (held_out["job"], held_out["predicted"]) == (11, pytest.approx(loss_of(*sizes[11]), rel=1e-4))
    assert held_out["times_largest"] == {"N": 1.0, "D": 1.0}
    (predicted,) = facts["predictions"]
    assert predicted["predicted"] == pytest.approx(loss_of(30e6, 600e6), rel=1e-4)
    assert predicted["times_largest"]["D"] == pytest.approx(600e6 / TOKENS[-1])
    assert [6 * each["N"] * each["D"] for each in facts["optima"]] == pytest.approx([1e15, 1e16])
    assert [run["job"] for run in facts["runs"]] == [*range(1, 11)]
    assert facts["excluded"] == [{"job": 0, "run_dir": "0", "reason": "matches exclude=0"}]
    assert json.loads((copied / "scaling.json").read_text()) == json.loads(json.dumps(facts))
    assert (copied / "scaling.png").read_bytes().startswith(b"\x89PNG")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["12 jobs: 10 fitted, 1 held out, 1 left out", "job 0 left out: matches exclude=0"]
    assert "L(N, D) = E + A/N^alpha + B/D^beta, N: parameters without embeddings and head, D: tokens trained" in lines
    assert lines[-1] == f"in {copied}: scaling.json, scaling.png"


@pytest.mark.long
def test_jobs_of_one_length_give_a_law_in_n(copied, capsys):
    for index in range(12):
        if index % 3 != 1:
            shutil.rmtree(copied / str(index))
    (copied / "scaling.json").write_text('{"law": {}, "runs": [], "excluded": []}')  # an earlier output, replaced
    facts = run(f"dir={copied}", "predict=N=1M", "picture=false")
    assert facts["law"]["form"] == "L(N) = E + A/N^alpha"
    assert json.loads((copied / "scaling.json").read_text()) == json.loads(json.dumps(facts))
    assert facts["predictions"][0]["predicted"] == pytest.approx(loss_of(1e6, TOKENS[1]), rel=1e-3)
    assert (facts["predictions"][0]["N"], facts["predictions"][0]["D"]) == (1e6, TOKENS[1])
    assert "note: all jobs have D = 40k, so E contains the term B/D^beta" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="predict: has D=80k, but all fitted jobs have D=40k"):
        run(f"dir={copied}", "predict=N=1M D=80k")
    with pytest.raises(ConfigError, match="budgets: needs a law in N and D, but only N differs"):
        run(f"dir={copied}", "budgets=1e15")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["predict=30M"], "predict: is 30M; write predict='N=30M D=600M'"),
        (["predict=N=3.5 D=1M"], "predict: is N=3.5 D=1M: N='3.5' is not a whole number"),
        (["predict=N=0 D=1M"], "predict: is N=0 D=1M but N must be at least 1"),
        (["predict=N=1M"], "predict: is N=1M, which has no D; write predict='N=30M D=600M'"),
        (["predict="], "predict: is empty"),
        (["budgets=-1"], "budgets: is -1 but must be above 0"),
        (["budgets=much"], "budgets"),
        (["confidence=1"], "confidence: is 1 but must be below 1"),
        (["exclude=model.hidden_size=*"], "exclude: is model.hidden_size=*, which matches no job"),
        (["exclude=[2,5,8,11]"], "have 2 values of D, but its term needs 3"),
        (["exclude=[2,3,4,5,6,7,8,9,10,11]"], "whose usable jobs are 2, but the law has 3 parameters"),
        (["exclude=[0,1,2,3,4,5]"], "have 2 values of N, but its term needs 3"),
        (
            ["metric=accuracy"],
            "whose usable jobs are 0, but the law has 3 parameters; add jobs (12 jobs left out; job 0: has no accuracy",
        ),
    ],
)
def test_wrong_input_is_refused_in_one_line(jobs, words, message):
    with pytest.raises(ConfigError) as caught:
        run(f"dir={jobs[0]}", *words, "picture=false")
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert not (jobs[0] / "scaling.json").exists()


def test_files_of_others_are_not_replaced(copied):
    (copied / "scaling.json").write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match=r"scaling\.json: is .* which exists and is not an earlier output"):
        run(f"dir={copied}")
    assert (copied / "scaling.json").read_text() == '{"mine": 1}'


def test_parameter_counts_leave_out_embeddings_and_head(tmp_path):
    write_job(tmp_path / "own", width=16)
    write_job(tmp_path / "tied", width=16, changes={"model.tie_embeddings": True})
    (own, total), (tied, tied_total) = (count_parameters(build_unfilled(tmp_path / name)) for name in ("own", "tied"))
    block = 4 * 16 * 16 + 3 * 16 * 32 + 2 * 16  # attention, feed-forward layers and norms
    assert own == tied == block + 16
    assert total == own + 2 * 257 * 16
    assert tied_total == tied + 257 * 16
