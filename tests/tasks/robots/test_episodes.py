"""Episodes as windows: compared with a naive reference, split by episode, in the global order on any ranks."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import examples
from support.policy_parts import windowed

from foundry.core.errors import ConfigError
from foundry.data.loader import Loader, held_out_batches
from foundry.data.order import GlobalOrder
from foundry.tasks.robots.data.episodes import Recording, Windows, held_out_episodes, normalised_by
from foundry.tasks.robots.data.statistics import Statistics, statistics_of

TASKS = ("push the red block", "touch it", "")
LENGTHS = st.lists(st.integers(1, 9), min_size=2, max_size=8)


def record(lengths, *, seed=0, with_images=False, state_dim=3, action_dim=2):
    draw, frames = np.random.default_rng(seed), sum(lengths)
    return Recording(
        state=draw.normal(size=(frames, state_dim)).astype(np.float32),
        actions=draw.uniform(-1, 1, (frames, action_dim)).astype(np.float32),
        lengths=np.array(lengths, dtype=np.int64),
        images=draw.integers(0, 256, (frames, 3, 8, 8)).astype(np.uint8) if with_images else None,
        tasks=TASKS,
        task_index=np.repeat(np.arange(len(lengths)) % len(TASKS), lengths),
    )


def naive(recording, episodes, statistics, num_observations, horizon, instructions):
    """Build each sample with loops over the frames of its episode."""
    samples = []
    for episode in episodes:
        start = int(sum(recording.lengths[:episode]))
        frames = list(range(start, start + int(recording.lengths[episode])))
        for now in range(len(frames)):
            seen = [frames[max(0, now - back)] for back in reversed(range(num_observations))]
            ahead = [frames[min(len(frames) - 1, now + step)] for step in range(horizon)]
            samples.append(
                {
                    "state": np.stack([statistics.normalise_state(recording.state[i]) for i in seen]),
                    "actions": np.stack([statistics.normalise_actions(recording.actions[i]) for i in ahead]),
                    "is_padded": np.array([now + step >= len(frames) for step in range(horizon)]),
                    "images": np.stack([recording.images[i] for i in seen]),
                    "instruction": instructions[episode % len(TASKS)],
                }
            )
    return samples


@settings(max_examples=examples(100), deadline=None)
@given(LENGTHS, st.integers(1, 4), st.integers(1, 12), st.data())
def test_every_window_matches_a_naive_reference(lengths, num_observations, horizon, data):
    recording = record(lengths, with_images=True)
    statistics = Statistics.of(recording.state, recording.actions)
    episodes = data.draw(st.lists(st.sampled_from(range(len(lengths))), min_size=1, unique=True).map(sorted))
    instructions = np.array([[4, 2, 3], [7, -1, -1], [-1, -1, -1]])
    sizes = {"num_observations": num_observations, "horizon": horizon, "instructions": instructions}
    windows = Windows(recording, np.array(episodes), statistics, **sizes)
    expected = naive(recording, episodes, statistics, num_observations, horizon, instructions)
    assert len(windows) == len(expected)
    order = data.draw(st.permutations(range(len(expected))))
    batch = windows.batch(order)
    for name in ("state", "actions", "is_padded", "images", "instruction"):
        stacked = torch.from_numpy(np.stack([expected[i][name] for i in order]))
        assert batch[name].dtype == stacked.dtype
        assert torch.equal(batch[name], stacked)
        assert torch.equal(windows[order[0]][name], stacked[0])


def test_windows_have_the_shapes_and_dtypes_of_policy_inputs():
    windows = windowed(record([5, 7, 4], with_images=True), num_observations=2, horizon=6, held_out=0.1).train
    batch = windows.batch([0, 3])
    assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in batch.items()} == {
        "state": ((2, 2, 3), torch.float32),
        "actions": ((2, 6, 2), torch.float32),
        "is_padded": ((2, 6), torch.bool),
        "images": ((2, 2, 3, 8, 8), torch.uint8),
    }
    plain = windowed(record([5, 7, 4]), num_observations=2, horizon=6, held_out=0.1).train
    assert "images" not in plain[0]


def test_statistics_exclude_validation_episodes():
    recording = record([6] * 20)
    held_out = np.repeat(held_out_episodes(20, 0.2), recording.lengths)
    splits = windowed(recording, num_observations=2, horizon=4, held_out=0.2)
    recording.state[held_out] += 1000
    recording.actions[held_out] *= 1000
    again = windowed(recording, num_observations=2, horizon=4, held_out=0.2)
    assert statistics_of(again).to_json() == statistics_of(splits).to_json()
    assert np.allclose(statistics_of(splits).state.mean, recording.state[~held_out].mean(0), atol=1e-6)
    assert again.fingerprint != splits.fingerprint


@settings(max_examples=examples(50), deadline=None)
@given(LENGTHS)
def test_splits_partition_the_episodes(lengths):
    splits = windowed(record(lengths), num_observations=1, horizon=1, held_out=0.3)
    assert len(splits.train) + len(splits.validation) == sum(lengths)
    assert splits.notes["train_episodes"] + splits.notes["validation_episodes"] == len(lengths)
    assert min(len(splits.train), len(splits.validation)) > 0


def test_larger_held_out_share_contains_the_smaller_one():
    small, large = held_out_episodes(100, 0.1), held_out_episodes(100, 0.3)
    assert (small.sum(), large.sum()) == (10, 30)
    assert large[small].all()
    assert held_out_episodes(2, 0.01).sum() == 1


@pytest.mark.parametrize(("lengths", "held_out"), [([5], 0.05), ([5, 5], 0.9)])
def test_too_few_episodes_are_refused(lengths, held_out):
    with pytest.raises(ConfigError, match=r"data\.held_out: is .* none would remain for training"):
        windowed(record(lengths), num_observations=2, horizon=4, held_out=held_out)


@pytest.mark.parametrize("name", ["state", "actions"])
def test_nonfinite_values_are_reported_with_episode_and_frame(name):
    recording = record([4, 5, 6])
    getattr(recording, name)[4 + 2, 1] = np.nan
    with pytest.raises(ConfigError, match=f"has NaN or infinite values in {name}, first in frame 2 of episode 1"):
        windowed(recording, num_observations=2, horizon=4, held_out=0.1)


def test_episode_order_on_two_ranks_equals_one_process():
    splits = windowed(record([7, 9, 11, 4]), num_observations=2, horizon=4, held_out=0.1)

    def windows(dp_rank, dp_size, num_workers=0):
        loader = Loader(
            dataset=splits.train,
            order=GlobalOrder(num_samples=len(splits.train), fingerprint=splits.fingerprint, seed=1),
            batch_size_at=lambda samples: 8,
            per_gpu_batch_size=2,
            dp_rank=dp_rank,
            dp_size=dp_size,
            num_workers=num_workers,
        )
        return [loader.next_window().microbatches for _ in range(6)]

    def by_position(ranks):
        batches = [batch for rank in ranks for window in rank for batch in window]
        return {
            int(position): {name: batch[name][row] for name in ("state", "actions", "is_padded")}
            for batch in batches
            for row, position in enumerate(batch["position"])
        }

    one = by_position([windows(0, 1)])
    for ranks in ([windows(0, 2), windows(1, 2)], [windows(0, 1, num_workers=1)]):
        other = by_position(ranks)
        assert list(range(48)) == sorted(one) == sorted(other)
        assert all(torch.equal(one[p][name], other[p][name]) for p in one for name in one[p])


def test_validation_frames_are_read_once():
    splits = windowed(record([7, 9, 11, 4]), num_observations=2, horizon=4, held_out=0.5)
    batches = held_out_batches(splits.validation, per_gpu_batch_size=4, dp_rank=0, dp_size=1, max_samples=None)
    positions = torch.cat([batch["position"] for batch in batches])
    assert positions[positions >= 0].tolist() == list(range(len(splits.validation)))


def test_pickled_windows_memory_map_their_image_file(tmp_path):
    recording = record([40, 40], with_images=True)
    np.save(tmp_path / "images.npy", recording.images)
    mapped = Recording(
        state=recording.state,
        actions=recording.actions,
        lengths=recording.lengths,
        images=np.load(tmp_path / "images.npy", mmap_mode="r"),
    )
    windows = windowed(mapped, num_observations=2, horizon=4, held_out=0.1).train
    pickled = pickle.dumps(windows)
    assert len(pickled) < recording.images.nbytes / 2
    assert torch.equal(pickle.loads(pickled)[3]["images"], windows[3]["images"])


def test_other_episodes_are_normalized_with_the_statistics_of_the_run():
    own = windowed(record([6] * 4, seed=1), num_observations=2, horizon=4, held_out=0.3)
    other = windowed(record([5] * 4, seed=2), num_observations=2, horizon=4, held_out=0.3)
    changed = normalised_by(other, statistics_of(own))
    assert statistics_of(changed) is statistics_of(own)
    raw = statistics_of(other).restore_actions(other.validation[0]["actions"].numpy())
    assert np.allclose(changed.validation[0]["actions"], statistics_of(own).normalise_actions(raw), atol=1e-6)
    assert not torch.equal(changed.train[0]["state"], other.train[0]["state"])
    narrow = windowed(record([5] * 4, state_dim=1), num_observations=2, horizon=4, held_out=0.3)
    with pytest.raises(ConfigError, match=r"data\.state_dim: is 1 but the run was trained with 3"):
        normalised_by(narrow, statistics_of(own))
