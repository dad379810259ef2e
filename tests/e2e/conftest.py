import pytest
from support.terminal import Shell
from support.tiny import TINY_DIT, TINY_LM
from support.warm import WarmShell


@pytest.fixture(scope="session")
def lm(tmp_path_factory, cache):
    """The run directory of a finished small language model, and what was said; not to be changed."""
    shell = Shell(tmp_path_factory.mktemp("lm"), cache)
    message = shell.run(*TINY_LM, "hydra.run.dir=run", "hparams.ema_decay=0.9")
    return shell.cwd / "run", *message


@pytest.fixture(scope="session")
def digits(tmp_path_factory, cache):
    """The run directory of a finished small diffusion model; not to be changed."""
    shell = WarmShell(tmp_path_factory.mktemp("digits"), cache)
    shell.run(*TINY_DIT, "scheduler=wsd", "hydra.run.dir=run")
    return shell.cwd / "run"
