"""Loading checkpoints that a run deletes meanwhile, and damaged ones."""

import shutil

import pytest

from foundry.core.errors import ConfigError, Violation
from foundry.engine.restore import retry_if_replaced
from foundry.run_dir.checkpoints import find, step_name


def publish(run, step):
    folder = run / "checkpoints" / step_name(step)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize("deleted", [0, 1, 5])
@pytest.mark.parametrize("error", [FileNotFoundError("gone"), ConfigError(Violation("which", "is not whole"))])
def test_checkpoint_deleted_while_reading_is_replaced_by_the_next(tmp_path, deleted, error):
    publish(tmp_path, 0)
    steps = iter(range(1, deleted + 1))

    def read():
        folder = find(tmp_path)
        if step := next(steps, None):
            publish(tmp_path, step)
            shutil.rmtree(folder)
            raise error
        return folder

    assert retry_if_replaced(tmp_path, "last", read).name == step_name(deleted)


@pytest.mark.parametrize("is_training", [True, False])
def test_damaged_checkpoint_that_stays_is_read_once(tmp_path, is_training):
    publish(tmp_path, 0)
    reads = []

    def read():
        reads.append(1)
        if is_training:
            publish(tmp_path, len(reads))
        raise ConfigError(Violation("which", "is not whole"))

    with pytest.raises(ConfigError):
        retry_if_replaced(tmp_path, "last", read)
    assert len(reads) == 1
