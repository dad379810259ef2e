"""Arguments and environment of the process of a job."""

import re

import pytest

from foundry.sweeps import worker


@pytest.mark.parametrize(
    ("words", "variables", "line"),
    [
        ([], {}, r"trust: the configuration in RUN_DIR may run code; .*"),
        (["gone", "trust=true"], {}, r"RUN_DIR: is /.*/gone, which is not the run directory of a job; is its disk .*"),
        (["job", "trust=true"], {"PET_NNODES": "1:2"}, r"environment variable PET_NNODES: '1:2' is elastic: .*"),
    ],
)
def test_refusal_is_one_line(tmp_path, monkeypatch, capsys, words, variables, line):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job" / ".hydra").mkdir(parents=True)
    (tmp_path / "job" / ".hydra" / "hydra.yaml").touch()
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert worker.main(words) == 2
    assert re.fullmatch(line + "\n", capsys.readouterr().err)
