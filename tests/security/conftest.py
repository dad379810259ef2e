"""Fixtures with tiny finished runs, for tests that damage them."""

import shutil

import pytest
from support.built_once import built_once
from support.composition import configure
from support.tiny import TINY_DIT, TINY_LM

from foundry.engine.train import train


@pytest.fixture(scope="session")
def finished(tmp_path_factory, cache):
    """A folder with the finished runs `lm` and `dit`."""

    def build(folder):
        for name, overrides in (("lm", TINY_LM), ("dit", TINY_DIT)):
            train(
                configure(*overrides, "tracking=none", "evaluation.write_samples=false", "tracking.progress=false"),
                folder / name,
            )

    return built_once("finished", build, cache, tmp_path_factory)


@pytest.fixture
def lm(finished, tmp_path):
    """A copy of the language model's run directory."""
    return shutil.copytree(finished / "lm", tmp_path / "lm", symlinks=True)


@pytest.fixture
def dit(finished, tmp_path):
    """A copy of the diffusion model's run directory."""
    return shutil.copytree(finished / "dit", tmp_path / "dit", symlinks=True)
