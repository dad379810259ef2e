"""Scenes: images and descriptions at the start of episodes, cached, split, with reserved seeds."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from support.reach import Reach

from foundry.core.errors import ConfigError
from foundry.tasks.robots.data import demonstrations
from foundry.tasks.robots.data.scenes import FIRST_SEED, scenes

SETTINGS = {"num_scenes": 12, "image_size": 16, "seq_len": 96, "vocab_size": 257, "tokenizer": None, "held_out": 0.25}


class RecordingReach(Reach):
    """Records resets and closes, and describes the location of the goal."""

    seeds, closed = [], []

    def reset(self, seed):
        self.seeds.append(seed)
        return super().reset(seed)

    def describe(self, draw):
        side = "left" if self._now.goal[0] < 0 else "right"
        return [(f"which side {draw.integers(10)} ?", side), ("is there a goal ?", "yes")]

    def close(self):
        self.closed.append(True)


@pytest.fixture
def make_scenes(tmp_path):
    RecordingReach.seeds.clear()
    RecordingReach.closed.clear()
    make = partial(RecordingReach, image_size=16)
    return partial(scenes, seed=0, cache_dir=str(tmp_path), simulator=make, simulator_settings={"task": 1}, **SETTINGS)


def texts(data, split):
    return [data.tokenizer.decode(split[index]["tokens"].tolist()) for index in range(len(split))]


def test_scene_sample_is_an_image_with_its_conversation(make_scenes):
    data = make_scenes()
    assert (len(data.train), len(data.validation), data.notes["train_rows"]) == (9, 3, 9)
    assert RecordingReach.seeds == [FIRST_SEED + number for number in range(12)]
    assert RecordingReach.closed == [True]
    simulator, found = RecordingReach(image_size=16), 0
    for split in (data.train, data.validation):
        for index, text in enumerate(texts(data, split)):
            sample = split[index]
            assert sample["images"].shape == (1, 3, 16, 16)
            assert sample["images"].dtype == torch.uint8
            picture = sample["images"][0].permute(1, 2, 0).numpy()
            matching = [
                seed for seed in RecordingReach.seeds[:12] if np.array_equal(simulator.reset(seed)["image"], picture)
            ]
            simulator.reset(matching[0])
            side = simulator.describe(np.random.default_rng(0))[0][1]
            assert f"assistant: {side}" in text
            found += len(matching)
    assert found == 12


def test_only_answers_about_scenes_are_trained(make_scenes):
    data = make_scenes()
    sample = data.train[0]
    learnt = data.tokenizer.decode(sample["targets"][sample["targets"] >= 0].tolist(), skip_special_tokens=True)
    assert learnt in ("leftyes", "rightyes")
    prompt = data.prompts[0]
    assert prompt.answer == "yes"
    assert torch.equal(prompt.images, data.validation[0]["images"])
    assert data.tokenizer.decode(prompt.tokens[prompt.turn :]) == "user: is there a goal ?\nassistant: "
    assert [prompt.images.shape for prompt in data.prompts[:2]] == [(1, 3, 16, 16)] * 2


def test_scene_batch_equals_its_samples_and_pickles_without_pixels(make_scenes):
    import pickle

    data = make_scenes()
    batch = data.train.batch([3, 0])
    assert batch["images"].shape == (2, 1, 3, 16, 16)
    for row, index in enumerate((3, 0)):
        sample = data.train[index]
        length = len(sample["tokens"])
        assert torch.equal(batch["images"][row], sample["images"])
        assert torch.equal(batch["tokens"][row, :length], sample["tokens"])
        assert data.train.num_tokens([index]) == length
    sent = pickle.dumps(data.train)
    assert len(sent) < 5000
    assert torch.equal(pickle.loads(sent)[2]["images"], data.train[2]["images"])


def test_scenes_are_cached_for_every_seed_and_tokenizer(make_scenes):
    first = make_scenes()
    again = make_scenes(seed=5)
    other = make_scenes(vocab_size=300)
    assert len(RecordingReach.seeds) == 12
    assert first.fingerprint == again.fingerprint != other.fingerprint
    assert first.notes["scenes"] == other.notes["scenes"]
    assert make_scenes(simulator_settings={"task": 2}).fingerprint != first.fingerprint
    assert make_scenes(num_scenes=13).fingerprint != first.fingerprint


def test_scene_seeds_differ_from_demonstrations_and_evaluations():
    assert FIRST_SEED >= demonstrations.FIRST_SEED + 2**31
    assert demonstrations.FIRST_SEED >= 2**32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"simulator": None}, "simulator: none is incompatible with data=scenes"),
        ({"image_size": None}, "simulator.image_size: null is incompatible with data=scenes"),
        ({"simulator": partial(Reach, image_size=16)}, "data: is scenes but Reach has no describe"),
        ({"image_size": 24}, "data.image_size: is 24 but RecordingReach returns no image of this size"),
        ({"simulator": RecordingReach}, "data.image_size: is 16 but RecordingReach returns no image of this size"),
        ({"seq_len": 20}, "more than data.seq_len=20"),
    ],
)
def test_impossible_scenes_are_refused(make_scenes, changes, message):
    with pytest.raises(ConfigError, match=message):
        make_scenes(**changes)


def test_tabletop_describes_the_locations_of_its_blocks():
    pytest.importorskip("mujoco")
    from foundry.core.simulator import Describing
    from foundry.tasks.robots.simulators.tabletop import Tabletop

    simulator, orders = Tabletop(task="touch"), set()
    assert isinstance(simulator, Describing)
    for seed in range(60):
        state = simulator.reset(seed)["state"]
        described = simulator.describe(np.random.default_rng(seed))
        assert described == simulator.describe(np.random.default_rng(seed))
        asked = [f"where is {colour} ?" for colour in ("blue", "green", "red")]
        assert sorted(question for question, _ in described) == sorted([simulator.instruction, *asked])
        meant = simulator.instruction.split()[2]
        assert dict(described)[simulator.instruction] == dict(described)[f"where is {meant} ?"]
        for index, colour in enumerate(("red", "green", "blue")):
            x, y = state[2 + 4 * index : 4 + 4 * index]
            column = "left" if x < -0.08 else "right" if x >= 0.08 else "middle"
            row = "near" if y < -0.08 else "far" if y >= 0.08 else "centre"
            assert dict(described)[f"where is {colour} ?"] == f"{column} {row}"
        orders.add(json.dumps([question for question, _ in described if question in asked]))
    assert len(orders) == 6  # The three questions about colors appear in every order.
    simulator.close()
