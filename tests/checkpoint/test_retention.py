import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tiny import TINY_DIT

from foundry import compose, run
from foundry.checkpoint.retention import remove_leftovers, to_remove

STEPS = st.sets(st.integers(0, 500), max_size=30)
COUNT = st.none() | st.integers(1, 40)


@given(STEPS, COUNT, COUNT, st.none() | st.integers(0, 500))
def test_retention_keeps_newest_best_and_multiples(steps, keep_last, keep_every, best):
    removed = to_remove(steps, keep_last=keep_last, keep_every_steps=keep_every, best=best)
    kept = steps - set(removed)
    assert removed == sorted(set(removed))
    assert set(removed) <= steps
    assert best not in removed
    if keep_last is None:
        assert not removed
        return
    newest = set(sorted(steps)[-keep_last:])
    assert newest <= kept
    assert {step for step in steps if keep_every and step % keep_every == 0} <= kept
    for step in kept - newest - {best}:
        assert keep_every is not None
        assert step % keep_every == 0


@given(STEPS, COUNT, COUNT, st.none() | st.integers(0, 500))
def test_retention_is_idempotent(steps, keep_last, keep_every, best):
    options = {"keep_last": keep_last, "keep_every_steps": keep_every, "best": best}
    removed = to_remove(steps, **options)
    assert to_remove(steps - set(removed), **options) == []


def test_run_keeps_its_newest_checkpoint_and_the_multiples(tmp_path):
    words = ["hparams.max_steps=7", "checkpoint.interval=1", "checkpoint.keep_last=1", "checkpoint.keep_every=3"]
    quiet = ["tracking=none", "evaluation.interval=null", "evaluation.write_samples=false"]
    run(compose([*TINY_DIT, *words, "checkpoint.keep_best.metric=null", *quiet]), tmp_path / "run")
    assert [name for name in names(tmp_path / "run") if name.startswith("step_")] == [
        "step_00000003",
        "step_00000006",
        "step_00000007",
    ]


@pytest.fixture
def folders(tmp_path):
    names = ["step_00000001", "step_00000002", "step_00000003", ".step_00000004.partial", ".step_00000000.removed"]
    for name in names:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "file").write_text("x")
    return tmp_path


def names(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_remove_leftovers_keeps_checkpoints(folders):
    remove_leftovers(folders)
    assert names(folders) == ["step_00000001", "step_00000002", "step_00000003"]
