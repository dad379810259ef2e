import json

import pytest
from support.built_once import built_once
from support.terminal import Shell
from support.tiny import PLOTS, TINY_DIT, TINY_LM
from support.warm import WarmShell


@pytest.fixture(scope="session")
def lm(tmp_path_factory, cache):
    """Run directory of a finished small language model, and its stdout and stderr; read-only."""

    def build(folder):
        (folder / "cwd").mkdir()
        message = Shell(folder / "cwd", cache).run(*TINY_LM, *PLOTS, "hydra.run.dir=run", "hparams.ema_decay=0.9")
        (folder / "message.json").write_text(json.dumps(message))

    folder = built_once("lm", build, cache, tmp_path_factory)
    return folder / "cwd" / "run", *json.loads((folder / "message.json").read_text())


@pytest.fixture(scope="session")
def digits(tmp_path_factory, cache):
    """Run directory of a finished small diffusion model; read-only."""

    def build(folder):
        WarmShell(folder, cache).run(*TINY_DIT, *PLOTS, "scheduler=wsd", "hydra.run.dir=run")

    return built_once("digits", build, cache, tmp_path_factory) / "run"
