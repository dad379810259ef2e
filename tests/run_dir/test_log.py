import logging
import logging.config

import pytest
from omegaconf import OmegaConf
from support.small_disk import fill, small_disk

from foundry.config.composition.compose import config_dir


@pytest.fixture
def log_in():
    """A function that configures logging into a folder as a run does; the test ends with the previous handlers."""
    root, names = logging.getLogger(), {"hydra": {"runtime": {}, "job": {"name": "foundry"}}}
    before = root.handlers[:], root.level

    def set_up(folder):
        names["hydra"]["runtime"]["output_dir"] = str(folder)
        config = OmegaConf.merge(names, {"own": OmegaConf.load(f"{config_dir()}/hydra/job_logging/foundry.yaml")}).own
        logging.config.dictConfig(OmegaConf.to_container(config, resolve=True))
        return root

    yield set_up
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = before


def test_log_reports_a_full_disk_once_and_continues_with_free_space(tmp_path, log_in, capsys):
    with small_disk(tmp_path, "16k"):
        log = log_in(tmp_path)
        log.info("the first")
        fill(tmp_path / "ballast")
        for number in range(100):
            log.info("%d %s", number, "x" * 80)
        stderr = capsys.readouterr().err
        assert stderr.count("\n") == 1
        assert "foundry.log: [Errno 28] No space left on device (the run continues; logged once)" in stderr
        (tmp_path / "ballast").unlink()
        log.info("the last")
        assert capsys.readouterr().err == ""
        lines = (tmp_path / "foundry.log").read_text().splitlines()
        assert lines[0].endswith("the first")
        assert stderr.strip() in lines
        assert lines[-1].endswith("the last")


def test_a_wrong_call_is_shown_whole(tmp_path, log_in, capsys):
    log_in(tmp_path).info("%d", "no number")
    stderr = capsys.readouterr().err
    assert "--- Logging error ---" in stderr
    assert "test_a_wrong_call_is_shown_whole" in stderr
