"""Sweeps with too many or invalid jobs: jobs are counted without enumerating them, and equal errors are merged."""

from contextlib import nullcontext

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from support.sweep_dirs import SweepDir

from foundry.config.schemas.sweeper import Sweep
from foundry.core.errors import ConfigError, Violation
from foundry.core.exit_codes import ExitCode
from foundry.sweeps.compose_jobs import compose_jobs
from foundry.sweeps.grid import count_values, expand
from foundry.sweeps.job import Job
from foundry.sweeps.reading import read_sweep
from foundry.sweeps.refusals import refusals
from foundry.sweeps.sweeper import GridSweeper


@pytest.mark.parametrize(
    ("states", "code"),
    [
        (["finished", "stopped"], ExitCode.UNFINISHED),
        (["stopped", "failed"], ExitCode.FAILED),
        (["lost", "finished"], ExitCode.FAILED),
        (["finished", "paused"], None),
    ],
)
def test_end_of_a_sweep_has_the_exit_code_of_its_report(tmp_path, events, capsys, states, code):
    """A sweep that can go on, because jobs were stopped, does not count as failed."""
    folder = SweepDir(tmp_path / "s", type(events))
    for number, state in enumerate(states):
        folder.job(f"a={number}", state=state, reason=f"reason {number}")
    sweeper = GridSweeper()
    sweeper.sweep_dir, sweeper.config = folder.folder, OmegaConf.create({"tracking": {"progress": "bar"}})
    jobs = [Job.recorded(entry) for entry in folder.facts["jobs"]]
    with nullcontext() if code is None else pytest.raises(SystemExit) as ended:
        sweeper.report(jobs)
    assert code is None or ended.value.code == code == read_sweep(folder.folder).exit_code
    named = [line for line in capsys.readouterr().err.splitlines() if "; see " in line]
    assert len(named) == sum(state in ("stopped", "failed", "lost") for state in states)


def parse(*words):
    return OverridesParser.create().parse_overrides(list(words))


def refused(*words, **options):
    with pytest.raises(ConfigError) as error:
        expand(parse(*words), Sweep(**options))
    return str(error.value)


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["a=range(1000000)"], "1000000"),
        (["a=shuffle(range(1000000))"], "1000000"),
        (["a=sort(range(0,1,1e-9), reverse=true)"], "1000000000"),
        (["a=range(0,-1000000,-1)"], "1000000"),
        (["a=range(1000)", "b=range(1000)"], "1000000"),
        (["a=range(3000)", "b=1,2"], "6000"),
        (["a=range(0,1e300,1e-300)"], "about 10^600"),
        ([f"a{key}=range(0,1e300,1e-300)" for key in range(9)], "about 10^5400"),
    ],
)
def test_max_jobs_counts_jobs_without_enumerating_them(words, number):
    line = refused(*words)
    assert line.startswith(f"hydra.sweeper.max_jobs: is 5000 but the sweep has {number} jobs (")
    assert "\n" not in line
    assert len(line) < 600


def test_max_jobs_counts_zipped_keys_once():
    words = parse("a=range(3000)", "b=range(3000)")
    assert len(expand(words, Sweep(zip=[["a", "b"]]))) == 3000
    assert "has 3000 jobs" in refused("a=range(3000)", "b=range(3000)", zip=[["a", "b"]], max_jobs=2999)


def test_max_jobs_is_configurable():
    assert len(expand(parse("a=range(5001)"), Sweep(max_jobs=5001))) == 5001
    assert "is 2 but the sweep has 3 jobs (a has 3 values)" in refused("a=1,2,3", max_jobs=2)


@pytest.mark.parametrize("values", ["range(0,1,0)", "range(0,1,0.0)", "range(1,0,0)", "shuffle(range(0,5,0))"])
def test_range_with_a_zero_step_or_no_end_is_refused(values):
    assert refused(f"a={values}", "b=range(0,inf)").splitlines() == [
        f"a: is {values}, which has a step of 0; give another",
        "b: is range(0,inf), which has no end; give finite numbers",
    ]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    start=st.integers(-50, 50) | st.floats(-5, 5).map(lambda x: round(x, 3)),
    stop=st.integers(-50, 50) | st.floats(-5, 5).map(lambda x: round(x, 3)),
    step=st.sampled_from([1, 3, -2, 0.5, 0.1, -0.25, 7.5]),
)
def test_count_values_equals_the_number_of_enumerated_values(start, stop, step):
    (override,) = parse(f"a=range({start},{stop},{step})")
    assert count_values(override) == len(list(override.sweep_iterator()))


def message(sweep, *words):
    loader, master = sweep
    jobs = expand(parse(*words), Sweep())
    results = compose_jobs(loader, master(*words), [job.overrides for job in jobs])
    return [str(violation) for violation in refusals(jobs, results)]


@pytest.mark.long
def test_many_jobs_with_the_same_error_are_one_line(sweep, option_reads):
    (line,) = message(sweep, "optimizer=adamw,sgd", "optimizer.momentum=range(0,0.0995,0.001)", "hparams.max_steps=9")
    assert len(option_reads) < 10  # one read per choice of options, not one per job
    assert line.startswith("optimizer.momentum: is not a setting of ")
    assert line.endswith("(100 of 200 jobs: 0, 1, 2, …; the first, job 0: optimizer=adamw, optimizer.momentum=0.0)")


@pytest.mark.long
def test_compose_jobs_gives_the_error_messages_of_hydra_composition(sweep):
    words = [
        ("optimizer=adamw", "optimizer.momentum=0.5", "hparams.lr=-1"),
        ("optimizer=sgd", "optimizer.momentum=0.5", "hparams.lr=-1"),
        ("optimizer=sdg", "optimizer.momentum=0.5", "hparams.lr=-1"),
        ("scheduler=wds", "hparams.lr=x"),
        ("data.seq_len=x", "nonsense=1", "hparams.lr=-1"),
    ]
    loader, master_of = sweep
    master = master_of()
    for job, result in zip(words, compose_jobs(loader, master, words), strict=True):
        with pytest.raises(ConfigError) as alone:
            loader.load_sweep_config(master, list(job))
        assert [str(v) for v in result.violations] == [str(v) for v in alone.value.violations]


def test_refusal_names_a_single_invalid_job_with_its_values(sweep):
    (line,) = message(sweep, "hparams.lr=1e-3,-1", "hparams.max_steps=9")
    assert line == "job 1 (hparams.lr=-1): hparams.lr: is -1 but must be above 0"


def test_refusals_have_one_line_per_error_in_job_order(sweep):
    lines = message(sweep, "hparams.lr=-1,-2,1e-3", "hparams.seed=1,-1", "hparams.max_steps=9")
    assert [line.partition(" but")[0] for line in lines] == [
        "hparams.lr: is -1",
        "hparams.seed: is -1",
        "hparams.lr: is -2",
    ]
    assert "(2 of 6 jobs: 0, 1; the first, job 0: hparams.lr=-1, hparams.seed=1)" in lines[0]


def test_refusals_merge_numeric_values_with_the_same_error(sweep):
    words = [f"hparams.lr={','.join(str(-number) for number in range(1, 40))}", "hparams.max_steps=9"]
    (line,) = message(sweep, *words)
    assert line == (
        "hparams.lr: is -1 but must be above 0 (39 of 39 jobs, with different values: 0, 1, 2, …; "
        "the first, job 0: hparams.lr=-1)"
    )


def test_refusals_merge_text_values_with_the_same_error():
    jobs = [Job(swept=(f"data.path=file_{name}.txt",)) for name in "abcdef"]
    wrong = [ConfigError(Violation("data.path", f"is {job.swept[0][10:]}, which does not exist")) for job in jobs]
    (line,) = refusals(jobs, wrong)
    assert "6 of 6 jobs, with different values" in str(line)
    assert len(refusals(jobs[:3], wrong[:3])) == 3
