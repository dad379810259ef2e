"""Plans of runs that exceed the memory of the machine or a sensible file size."""

import pytest
import torch
from support.examples import long_case
from test_memory import SMALL, microbatch_of
from test_memory import plan as memory

from foundry.commands.plan import _MOST_ROWS, _ROWS, _schedule_steps
from foundry.core.errors import ConfigError
from foundry.planning import memory as planning_memory


@pytest.mark.parametrize("total", [1, 2, _ROWS, _ROWS + 1, 3 * _ROWS - 1, 10**8, 10**12, 10**18])
def test_schedule_csv_has_a_bounded_number_of_rows(total):
    rows = _schedule_steps(None, total)
    assert 1 <= len(rows) <= _ROWS
    assert rows[-1] <= total
    assert total > _ROWS or list(rows) == list(range(1, total + 1))


def test_plan_every_sets_rows_up_to_a_limit():
    assert _schedule_steps(3, 10) == range(3, 11, 3)
    assert len(_schedule_steps(1, _MOST_ROWS)) == _MOST_ROWS
    with pytest.raises(ConfigError, match=r"plan\.every: is 1, which makes 100,000,000 rows .* set 1000"):
        _schedule_steps(1, 10**8)


@pytest.mark.parametrize(
    "overrides",
    [[], long_case(["hparams.grad_checkpointing=true"]), long_case(["hparams=diffusion", "model.num_heads=2"])],
)
def test_activations_scale_linearly_with_the_number_of_samples(configure, overrides, monkeypatch):
    config = configure(
        *SMALL[:1], "model.num_layers=2", *overrides, "hparams.per_gpu_batch_size=100", "hparams.global_batch_size=100"
    )
    batch = microbatch_of(config, seq_len=8)
    counted = memory(config, microbatch=batch).activations_estimated
    monkeypatch.setattr(planning_memory, "_COUNTED_SAMPLES", 20)
    # The loss keeps a few bytes for each chunk of positions.
    assert memory(config, microbatch=batch).activations_estimated == pytest.approx(counted, rel=1e-6)


@pytest.mark.long
def test_plan_supports_a_microbatch_larger_than_memory(configure):
    config = configure(
        *SMALL, "model.num_layers=4", "hparams.per_gpu_batch_size=1_000_000", "hparams.global_batch_size=1_000_000"
    )
    sample = {name: t[:1] for name, t in microbatch_of(configure(*SMALL)).items() if name != "position"}
    batch = {name: t.expand(10**6, *t.shape[1:]) for name, t in sample.items()}
    planned = memory(config, microbatch={**batch, "position": torch.zeros(10**6, dtype=torch.int64)})
    assert planned.activations_estimated > 10**12


def test_plan_supports_a_quadrillion_parameters(configure):
    sizes = [
        "hidden_size=1_000_000",
        "intermediate_size=10_000_000",
        "num_layers=30",
        "num_heads=1000",
        "num_kv_heads=1000",
    ]
    config = configure(*(f"model.{size}" for size in sizes), "optimizer=adamw")
    assert memory(config).weights > 10**15
