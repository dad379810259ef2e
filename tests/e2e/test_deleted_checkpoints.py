"""Commands whose checkpoint is deleted by the running training read the newer one, or refuse an explicit step."""

import shutil

import pytest
from support.composition import configure
from support.evaluated import evaluate
from support.small_text import RUN, SMALL, write_text

import foundry.checkpoint.tensor_index
import foundry.checkpoint.tensors
import foundry.commands.library
import foundry.engine.restore
import foundry.run_dir.checkpoints
from foundry.checkpoint.retention import remove
from foundry.commands.export import ExportOptions, export_checkpoint
from foundry.core.errors import ConfigError
from foundry.engine.restore import restore
from foundry.engine.train import train


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    words = [*RUN, *SMALL, write_text(folder), "data.vocab_size=260", "hparams.max_steps=3", "checkpoint.interval=1"]
    return train(configure(*words), folder / "run").run_dir


@pytest.fixture
def training(finished, tmp_path):
    """A copy of the run whose newest checkpoint is step 2, and a function that publishes step 3 and deletes step 2."""
    run = shutil.copytree(finished, tmp_path / "run", symlinks=True)
    checkpoints = run / "checkpoints"
    later = (checkpoints / "step_00000003").rename(tmp_path / "later")

    def link(name):
        for which in ("latest", "best"):
            (checkpoints / which).unlink(missing_ok=True)
            (checkpoints / which).symlink_to(name)

    def train_on():
        if later.exists():
            later.rename(checkpoints / "step_00000003")
            link("step_00000003")
            remove(checkpoints / "step_00000002")

    link("step_00000002")
    return run, train_on


@pytest.fixture
def deleted_at(training, monkeypatch):
    """A function that makes each call of a module's function first publish step 3 and delete step 2."""

    def delete_at(module, name):
        original = getattr(module, name)

        def late(*args, **kwargs):
            training[1]()
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, late)

    return delete_at


READERS = {
    "restore": lambda run, which: restore(run, which, ema=True).checkpoint.name,
    "export": lambda run, which: export_checkpoint(ExportOptions(run=str(run), out=f"{run}-hf", which=which)).name,
    "eval": lambda run, which: evaluate(run=str(run), which=which, max_samples=1)["checkpoint"],
}
STAGES = {
    "the link is read": (foundry.run_dir.checkpoints, "linked_step"),
    "the list is made": (foundry.run_dir.checkpoints, "list_checkpoints"),
    "it is verified": (foundry.engine.restore, "problems"),
    "its tensors are found": (foundry.checkpoint.tensors, "read_index"),
    "a tensor is read": (foundry.checkpoint.tensor_index, "open_regular"),
}


CASES = [("restore", stage, "last") for stage in STAGES]
CASES += [("restore", "it is verified", "best"), ("eval", "a tensor is read", "last")]
CASES += [("export", stage, "last") for stage in ("it is verified", "its tensors are found", "a tensor is read")]


@pytest.mark.parametrize(("reader", "stage", "which"), CASES)
def test_newer_checkpoint_is_read_if_the_first_is_deleted_at_stage(training, deleted_at, reader, stage, which):
    deleted_at(*STAGES[stage])
    assert READERS[reader](training[0], which) == "step_00000003"


def test_eval_on_other_data_needs_no_checkpoint_after_the_weights_are_read(finished, training, deleted_at):
    deleted_at(foundry.commands.library, "compose")
    data = ["data=text", f"data.path={finished.parent / 'text.txt'}", "data.seq_len=16"]
    assert evaluate(data, run=str(training[0]), max_samples=1)["checkpoint"] == "step_00000002"


@pytest.mark.parametrize("reader", ["restore", "export"])
def test_explicit_step_deleted_while_reading_is_a_config_error(training, deleted_at, reader):
    deleted_at(foundry.engine.restore, "problems")
    with pytest.raises(
        ConfigError, match=r"^which: .* has no checkpoint '2'; available: step_00000001, step_00000003$"
    ):
        READERS[reader](training[0], "2")


def test_export_contains_only_the_newer_checkpoint_if_the_first_is_deleted(training, deleted_at):
    run = training[0]
    deleted_at(foundry.checkpoint.tensor_index, "open_regular")
    for name in ("while-it-trains", "again"):
        export_checkpoint(ExportOptions(run=str(run), out=str(run.parent / name)))
    first, second = (run.parent / name for name in ("while-it-trains", "again"))
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert sorted(path.name for path in first.iterdir()) == sorted(path.name for path in second.iterdir())
