"""Success rate of a policy in episodes, and its records and animations."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from support.contexts import evaluation_context
from support.policy_parts import DATA, Blind, GoThere, Wandering
from support.reach import Reach

from foundry.core.errors import ConfigError
from foundry.data.corpora.tokenizer import train_tokenizer
from foundry.data.splits import DataSplits
from foundry.parallel.process_group import World
from foundry.tasks.robots.evaluators.episodes import Film, _Row
from foundry.tasks.robots.evaluators.films import save_gif
from foundry.tasks.robots.evaluators.rates import wilson_interval
from foundry.tasks.robots.evaluators.success import Success

ALONE = World.single(torch.device("cpu"))


def measure(folder, *, step=0, objective=None, simulator=Reach, heartbeat=lambda what: None, **settings):
    evaluator = Success(objective=objective or Wandering(), data=DATA, simulator=simulator, **settings)
    context = evaluation_context(folder, step=step, heartbeat=heartbeat)
    with torch.no_grad(), contextlib.closing(evaluator):
        return evaluator.evaluate(GoThere().eval(), context)


def lines(folder):
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def test_success_rate_has_an_interval_and_a_record_per_episode(tmp_path):
    metrics = measure(tmp_path, step=7, episodes=10, at_a_time=4)
    episodes = lines(tmp_path)
    solved = sum(episode["success"] for episode in episodes)
    assert 0 < solved < 10
    assert (metrics["success_low"], metrics["success_high"]) == wilson_interval(solved, 10)
    assert metrics["success"] == solved / 10
    assert metrics["episode_length"] == np.mean([episode["length"] for episode in episodes])
    assert [(one["step"], one["episode"], one["seed"]) for one in episodes] == [(7, k, k) for k in range(10)]
    assert {one["instruction"] for one in episodes} == {"reach the goal"}
    assert all(one["length"] == 30 for one in episodes if not one["success"])


def test_success_batches_have_one_shape_and_keys_by_episode_and_replan(tmp_path):
    objective = Wandering()
    measure(tmp_path, objective=objective, episodes=5, at_a_time=4, first_episode=3)
    assert {shape for shape, _ in objective.calls} == {((4, 2, 4))}
    starts = [index for index, (_, keys) in enumerate(objective.calls) if keys[0] % 2**31 == 0]
    assert len(starts) == 2
    first, second = objective.calls[: starts[1]], objective.calls[starts[1] :]
    assert [keys for _, keys in first] == [[k * 2**31 + n for k in (3, 4, 5, 6)] for n in range(len(first))]
    assert [keys for _, keys in second] == [[7 * 2**31 + n, -1, -1, -1] for n in range(len(second))]
    assert len(first) <= 15  # An episode has at most 30 steps, two per call.


def test_episode_does_not_depend_on_the_number_of_episodes(tmp_path):
    measure(tmp_path / "few", episodes=6, at_a_time=4)
    measure(tmp_path / "more", episodes=11, at_a_time=4)
    assert lines(tmp_path / "more")[:6] == lines(tmp_path / "few")
    measure(tmp_path / "later", episodes=3, at_a_time=4, first_episode=8)
    assert lines(tmp_path / "more")[8:] == lines(tmp_path / "later")


def test_noise_free_policy_succeeds_and_seeds_change_the_episodes(tmp_path):
    assert measure(tmp_path, objective=Wandering(noise=0.0), episodes=8)["success"] == 1.0
    one, other = (measure(tmp_path, objective=Wandering(seed), episodes=20)["episode_length"] for seed in (1, 2))
    assert one != other


def test_nonfinite_action_ends_the_episode(tmp_path, caplog):
    metrics = measure(tmp_path, objective=Wandering(noise=float("nan")), episodes=2)
    assert (metrics["success"], metrics["episode_length"]) == (0.0, 0.0)
    assert caplog.messages[0] == "episode 0 ends: an action is not finite"


@pytest.mark.parametrize("length", [0, 1, 4, 6])
def test_film_of_an_episode_has_its_start_and_end_also_after_a_nonfinite_action(length):
    row = _Row(Reach(), 1)
    row.begin(0)
    row.start_film(8)
    row.film.every = 4
    actions = np.full((length + 1, 2), -1e-6)
    actions[length] = np.nan
    row.execute(actions)
    assert row.is_over
    assert list(row.film.frames) == sorted({*range(0, length, 4), length})
    assert np.array_equal(row.film.frames[length], row.simulator.render(8))


def test_policy_gets_the_last_observations_and_images(tmp_path):
    class Looking(Wandering):
        def act(self, model, observation, keys):
            assert {name: tuple(value.shape) for name, value in observation.items()} == {
                "state": (2, 2, 4),
                "images": (2, 2, 3, 16, 16),
            }
            assert observation["images"].dtype == torch.uint8
            states.append(observation["state"][0].clone())
            return super().act(model, observation, keys)

    states = []
    measure(tmp_path, objective=Looking(noise=0.0), simulator=lambda: Reach(image_size=16), episodes=1, at_a_time=2)
    assert torch.equal(states[0][0], states[0][1])  # The first observation is repeated.
    moved = states[1][1, :2] - states[1][0, :2]
    assert 0 < moved.abs().max() <= 0.1 + 1e-6


def test_records_of_a_repeated_evaluation_step_are_replaced(tmp_path):
    for step in (4, 8, 12, 8):
        measure(tmp_path, step=step, episodes=2, at_a_time=2)
    assert [one["step"] for one in lines(tmp_path)] == [4, 4, 8, 8]


@pytest.mark.parametrize("strange", [b"\xff\n", b'{"step": Infinity}\n[]\nnull\n{"step": null}\n{"other": 1}\n{"st'])
def test_invalid_lines_of_the_rollouts_file_are_dropped(tmp_path, strange):
    (tmp_path / "rollouts.jsonl").write_bytes(strange)
    measure(tmp_path, step=4, episodes=2, at_a_time=2)
    assert [one["step"] for one in lines(tmp_path)] == [4, 4]


def test_eight_episodes_are_saved_as_a_gif(tmp_path):
    measure(tmp_path, step=3, episodes=10, at_a_time=9)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "rollouts.gif",
        "rollouts.jsonl",
        "rollouts_00000003.gif",
    ]
    file = tmp_path / "rollouts.gif"
    assert file.stat().st_size < 100_000
    with Image.open(file) as picture:
        assert picture.size == (4 * 102, 2 * 102)
        frames = [frame.convert("RGB").copy() for frame in ImageSequence.Iterator(picture)]
    assert 10 <= len(frames) <= 25
    borders = [frames[-1].getpixel((102 * (k % 4), 102 * (k // 4))) for k in range(8)]
    green, red = (5, 150, 105), (220, 38, 38)
    assert borders == [green if one["success"] else red for one in lines(tmp_path)[:8]]
    assert {frames[0].getpixel((102 * (k % 4), 102 * (k // 4))) for k in range(8)} == {(200, 200, 200)}


def test_film_of_a_long_episode_is_thinned_to_a_maximum_length():
    film = Film(10.0)
    for length in range(1001):
        if length % film.every == 0:
            film.add(length, np.full((1, 1, 3), length % 256, dtype=np.uint8))
    assert (film.every, list(film.frames)) == (64, [*range(0, 1000, 64)])
    film.add(1001, film.frames[0])
    assert list(film.frames)[-1] == 1001
    short = Film(10.0)
    for length in range(20):
        short.add(length, film.frames[0])
    assert (short.every, len(short.frames)) == (1, 20)


def test_films_of_different_lengths_stay_synchronized(tmp_path):
    def film(lengths, every, success):
        frames = {n: np.full((10, 10, 3), 20 * n, dtype=np.uint8) for n in lengths}
        return Film(20.0, success=success, every=every, frames=frames)

    save_gif([film([0, 1, 2, 3], 1, True), film([0, 4, 8, 10], 4, False)], tmp_path / "films.gif")
    with Image.open(tmp_path / "films.gif") as picture:
        frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(picture)]
        durations = [frame.info["duration"] for frame in ImageSequence.Iterator(picture)]
    assert durations == [120, 120, 120, 1500]  # A frame covers 4 actions of 0.05 s, shortened for viewing.
    assert [(one.getpixel((0, 0)), one.getpixel((16, 0))) for one in frames] == [
        ((200, 200, 200), (200, 200, 200)),
        ((5, 150, 105), (200, 200, 200)),
        ((5, 150, 105), (200, 200, 200)),
        ((5, 150, 105), (220, 38, 38)),
    ]
    assert [one.getpixel((24, 8))[0] for one in frames] == pytest.approx([0, 80, 160, 200], abs=20)
    assert [one.getpixel((8, 8))[0] for one in frames] == pytest.approx([0, 60, 60, 60], abs=20)


@pytest.mark.parametrize("options", [{"draw": False}, {"simulator": Blind}])
def test_success_is_measured_without_rendering(tmp_path, caplog, options):
    evaluator = Success(**({"objective": Wandering(), "data": DATA, "simulator": Reach, "episodes": 3} | options))
    context = evaluation_context(tmp_path, step=1)
    with torch.no_grad():
        assert evaluator.evaluate(GoThere(), context) == evaluator.evaluate(GoThere(), context)
    assert [path.name for path in tmp_path.iterdir()] == ["rollouts.jsonl"]
    expected = ["episodes are not filmed: no EGL here (success is still measured)"] if "simulator" in options else []
    assert caplog.messages == expected
    assert context.files == []


def test_simulators_match_at_a_time_and_are_closed(tmp_path):
    made = []

    class Counted(Reach):
        is_open = True

        def __init__(self):
            super().__init__()
            made.append(self)

        def close(self):
            self.is_open = False

    beats = []
    measure(tmp_path, simulator=Counted, heartbeat=beats.append, episodes=7, at_a_time=3)
    assert len(made) == 3
    assert not any(simulator.is_open for simulator in made)
    assert set(beats) == {"building simulators", "acting in episodes"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"simulator": None}, "needs a simulator; choose one, such as simulator=around"),
        (
            {"objective": object()},
            "measures a policy, which objective object lacks; choose objective=diffusion_policy",
        ),
        ({"data": DataSplits(train=[], validation=[], fingerprint="")}, "needs statistics of states and actions"),
    ],
)
def test_success_evaluator_requirements_are_config_errors(wrong, message):
    with pytest.raises(ConfigError) as refused:
        Success(**({"objective": Wandering(), "data": DATA, "simulator": Reach} | wrong))
    assert str(refused.value).startswith(f"evaluation.evaluators.success: {message}")


class Commanded(Reach):
    """The instruction alternates with the seed; the goal does not depend on the instruction."""

    instructions = ("reach the goal", "reach its mirror image", "stay")

    def reset(self, seed):
        self.instruction = self.instructions[seed % 2]
        return super().reset(seed)


class Obeying(Wandering):
    """A policy that records the instructions of each call."""

    def __init__(self, tokenizer):
        super().__init__(noise=0.0)
        self.tokenizer, self.instructions = tokenizer, []

    def act(self, model, observation, keys):
        rows = observation["instruction"]
        assert rows.shape == (len(keys), 24)
        self.instructions.append(
            [self.tokenizer.decode([i for i in row if i >= 0]) for row in rows[keys >= 0].tolist()]
        )
        return super().act(model, observation, keys)


def run_policy(folder, instruction):
    tokenizer = train_tokenizer(Commanded.instructions, 300)
    objective, data = Obeying(tokenizer), replace(DATA, tokenizer=tokenizer)
    words = {"instruction": instruction, "instruction_tokens": 24}
    evaluator = Success(objective=objective, data=data, simulator=Commanded, episodes=6, at_a_time=4, **words)
    with torch.no_grad(), contextlib.closing(evaluator):
        evaluator.evaluate(GoThere().eval(), evaluation_context(folder))
    batches = objective.instructions
    starts = [texts for index, texts in enumerate(batches) if index == 0 or texts != batches[index - 1]]
    return [text for texts in starts for text in texts], lines(folder)


def test_policy_gets_the_instruction_in_the_tokens_of_its_data(tmp_path):
    instructions, episodes = run_policy(tmp_path, "own")
    assert instructions == [Commanded.instructions[k % 2] for k in range(6)] == [one["instruction"] for one in episodes]
    assert not any("told" in one for one in episodes)


def test_other_instruction_keeps_the_success_criterion_of_the_episode(tmp_path):
    instructions, episodes = run_policy(tmp_path / "other", "other")
    _, own = run_policy(tmp_path / "own", "own")
    assert instructions == [one["told"] for one in episodes]
    assert all(one["told"] != one["instruction"] for one in episodes)
    assert len({one["told"] for one in episodes}) > 1
    assert [{**one, "told": None} for one in episodes] == [{**one, "told": None} for one in own]


def test_other_instruction_needs_a_simulator_with_several(tmp_path):
    with pytest.raises(ConfigError, match="instruction: is other but Reach has no instructions besides reach the goal"):
        measure(tmp_path, episodes=2, instruction="other")
