import pytest
import torch

from foundry.core.errors import ConfigError
from foundry.parallel.determinism import deterministic


def test_deterministic_mode_applies_to_the_body_only():
    with deterministic(False):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


def test_operation_without_a_deterministic_algorithm_is_a_config_error():
    line = r"^hparams\.deterministic: is true but .+ has no deterministic"
    with pytest.raises(ConfigError, match=line) as caught, deterministic(True):
        torch.nn.functional.max_unpool1d(torch.ones(1, 1, 2), torch.tensor([[[0, 2]]]), 2)
    assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="another"), deterministic(True):
        raise RuntimeError("another")
