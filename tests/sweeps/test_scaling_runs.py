"""Selection of the jobs of a sweep that a scaling law is fitted to."""

import json
import shutil

import pytest
from support.scaling_jobs import write_job, write_jobs

from foundry.core.errors import ConfigError
from foundry.sweeps.reading import read_sweep
from foundry.sweeps.scaling.runs import Parameters, select_runs


def select(folder, *, exclude=(), hold_out=(), count=lambda run_dir: (100, 300), **options):
    chosen = {"metric": "val_loss", "parameters": Parameters.non_embedding, **options}
    return select_runs(read_sweep(folder), count, exclude=exclude, hold_out=hold_out, **chosen)


def indices(runs):
    return [run.job.index for run in runs]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """A folder with four comparable jobs."""
    folder = tmp_path_factory.mktemp("jobs") / "sweep"
    write_jobs(folder, widths=(16, 32), tokens=(1000, 2000))
    return folder


@pytest.fixture
def copied(jobs, tmp_path):
    return shutil.copytree(jobs, tmp_path / "sweep")


def test_jobs_without_a_usable_result_are_left_out_with_a_reason(copied):
    write_job(copied / "4", state="failed")
    (copied / "4" / "foundry.log").write_text("NonFiniteError: loss is nan\n")
    write_job(copied / "5", state="queued")
    write_job(copied / "6", val_loss="NaN")
    write_job(copied / "7", tokens=None)
    write_job(copied / "8", step=7)
    write_job(copied / "9", val_loss=None)
    write_job(copied / "10", pruned="pruned: val_loss 9 at 25% of the run")
    write_job(copied / "11")
    (copied / "11" / "config.yaml").write_text("{")
    write_job(copied / "12", changes={"peft.method": "lora"})
    selection = select(copied)
    assert indices(selection.fitted) == [0, 1, 2, 3]
    assert {job.index: reason for job, reason in selection.excluded} == {
        4: "failed: NonFiniteError: loss is nan",
        5: "queued",
        6: "has val_loss=nan, which has no logarithm",
        7: "has no tokens in result.json; a law needs the number of trained tokens",
        8: "stopped at step 7 of 10, before the end of its learning-rate schedule",
        9: "has no val_loss in result.json",
        10: "pruned: val_loss 9 at 25% of the run",
        11: "has no readable config.yaml",
        12: "trains adapters (peft.method=lora)",
    }


def test_parameters_choose_what_counts_as_n(jobs):
    for parameters, number in ((Parameters.non_embedding, 100), (Parameters.total, 300)):
        run = select(jobs, parameters=parameters).fitted[1]
        assert (run.point, run.flops) == ((number, 2000), 6.0 * number * 2000)
        assert (run.non_embedding_parameters, run.total_parameters) == (100, 300)


def test_patterns_select_jobs_by_number_and_override(copied):
    for index, width in enumerate((16, 16, 32, 32)):
        (copied / str(index) / ".hydra").mkdir()
        (copied / str(index) / ".hydra" / "overrides.yaml").write_text(f"[model.hidden_size={width}]")
    selection = select(copied, exclude=["1"], hold_out=["model.hidden_size=3*"])
    assert indices(selection.fitted) == [0]
    assert indices(selection.held_out) == [2, 3]
    assert [(job.index, reason) for job, reason in selection.excluded] == [(1, "matches exclude=1")]
    with pytest.raises(ConfigError, match=r"hold_out: is model\.hidden_size=64, which matches no job"):
        select(copied, hold_out=["model.hidden_size=64"])


def test_held_out_job_without_a_result_is_refused(copied):
    write_job(copied / "4", state="failed")
    with pytest.raises(ConfigError, match="hold_out: selects job 4, which cannot be compared: failed"):
        select(copied, hold_out=["4"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.seq_len": 64}, "whose jobs differ in data.seq_len: 32 (jobs 0, 1, 2, 3), 64 (job 4)"),
        ({"data.num_rows": 9}, "whose jobs differ in data.num_rows: 2000 (jobs 0, 1, 2, 3), 9 (job 4)"),
        ({"evaluation.max_samples": 7}, "whose jobs differ in evaluation.max_samples"),
        ({"data.num_workers": 3, "data.cache_dir": "elsewhere", "hparams.lr": 1.0}, None),
    ],
)
def test_jobs_on_other_data_are_refused(copied, changes, message):
    write_job(copied / "4", changes=changes)
    if message is None:
        assert len(select(copied).fitted) == 5
        return
    with pytest.raises(ConfigError) as caught:
        select(copied)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(select(copied, exclude=["4"]).fitted) == 4


def test_jobs_with_another_tokenizer_are_refused(copied):
    (copied / "2" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"differ in tokenizer\.json"):
        select(copied)


def test_notes_name_other_swept_settings_and_repeated_data(copied):
    for index in range(4):
        (copied / str(index) / ".hydra").mkdir()
        words = [f"hparams.lr={1 + index}e-3", f"model.hidden_size={index}", f"hparams.max_steps={index}"]
        (copied / str(index) / ".hydra" / "overrides.yaml").write_text(json.dumps([*words, f"hparams.seed={index}"]))
    (copied / "3" / "plan.json").write_text(json.dumps({"total_steps": 10, "total_epochs": 2.5}))
    names = list(read_sweep(copied).names)
    assert select(copied).notes(names) == [
        "the jobs also differ in hparams.lr; the law assumes the best value for each N and D",
        "1 job trained for more than one epoch, up to 2.5; the law counts repeated tokens like new ones",
    ]
