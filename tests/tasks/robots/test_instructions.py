"""Instructions: the task of each episode as tokens, with a tokenizer trained on the training episodes only."""

import numpy as np
import pytest
from support.lerobot_parts import LENGTHS, write_by_hand
from support.policy_parts import windowed
from test_episodes import TASKS, record

from foundry.core.errors import ConfigError
from foundry.data.conversations.chat import BUILT_IN
from foundry.data.corpora.tokenizer import END_OF_DOCUMENT, train_tokenizer
from foundry.data.splits import DataSplits
from foundry.tasks.robots.data.demonstrations import demonstrations
from foundry.tasks.robots.data.episodes import held_out_episodes
from foundry.tasks.robots.data.instructions import encode_instructions
from foundry.tasks.robots.data.lerobot import lerobot
from foundry.tasks.robots.data.lerobot_writing import ACTION_KEY, STATE_KEY

WINDOWS = {"num_observations": 2, "horizon": 4, "held_out": 0.2}


def splits(recording=None, **changed):
    recording = record([5, 7, 4, 6, 3, 8]) if recording is None else recording
    return windowed(recording, **{**WINDOWS, "instruction_tokens": 24, "vocab_size": 300, **changed})


def words(data, sample):
    return data.tokenizer.decode([token for token in sample["instruction"].tolist() if token >= 0])


def test_every_sample_has_the_instruction_of_its_episode():
    data = splits()
    is_held_out = held_out_episodes(6, 0.2)
    for dataset, episodes in (
        (data.train, np.flatnonzero(~is_held_out)),
        (data.validation, np.flatnonzero(is_held_out)),
    ):
        told = [words(data, dataset[index]) for index in range(len(dataset))]
        lengths = np.array([5, 7, 4, 6, 3, 8])[episodes]
        assert told == [TASKS[e % 3] for e, length in zip(episodes, lengths, strict=True) for _ in range(length)]
    assert data.train[0]["instruction"].shape == (24,)


def test_instructions_are_omitted_unless_instruction_tokens_is_set():
    data = splits(instruction_tokens=None)
    assert "instruction" not in data.train[0]
    assert data.tokenizer is None
    assert data.fingerprint == splits(record([5, 7, 4, 6, 3, 8]), instruction_tokens=None).fingerprint
    assert data.fingerprint != splits().fingerprint != splits(vocab_size=257).fingerprint


def test_instruction_tokenizer_is_trained_on_training_episodes_only():
    lengths = [5, 7, 4, 6, 3, 8]
    recording = record(lengths)
    vars(recording)["tasks"] = ("push push push", "aaaaaaaaaaaa")
    vars(recording)["task_index"] = np.repeat(held_out_episodes(6, 0.2), lengths).astype(np.int64)
    data, again = splits(recording, instruction_tokens=40), splits(recording, instruction_tokens=40)
    assert data.tokenizer.to_str() == again.tokenizer.to_str()
    assert len(data.tokenizer.encode("push push push").ids) == 3
    assert len(data.tokenizer.encode("aaaaaaaaaaaa").ids) == 12


def test_given_instruction_tokenizer_is_used(tmp_path):
    train_tokenizer(["push the red block"] * 5, 300).save(str(tmp_path / "tokenizer.json"))
    data = splits(tokenizer=str(tmp_path))
    assert words(data, data.train[0]) == TASKS[0]
    with pytest.raises(ConfigError, match=r"data\.vocab_size: is 258 but data\.tokenizer=.* has \d+ entries"):
        splits(tokenizer=str(tmp_path), vocab_size=258)


def test_too_long_instruction_is_refused_by_name():
    data = DataSplits(train=[], validation=[], fingerprint="", tokenizer=train_tokenizer(["x"], 257))
    assert encode_instructions(["abc", ""], data, 4).tolist()[1] == [-1] * 4
    message = r"data\.instruction_tokens: is 4 but push the red block has 18 tokens; set it to at least 18"
    with pytest.raises(ConfigError, match=message):
        encode_instructions(["abc", TASKS[0]], data, 4)


def test_instruction_is_rendered_with_the_chat_template_of_the_tokenizer(tmp_path):
    train_tokenizer(["user: push the red block assistant:"] * 5, 400).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(BUILT_IN["plain"])
    data = splits(tokenizer=str(tmp_path), vocab_size=400)
    assert words(data, data.train[0]) == f"user: {TASKS[0]}\nassistant: "
    assert (data.chat_template, data.stop_ids) == (BUILT_IN["plain"], (data.tokenizer.token_to_id(END_OF_DOCUMENT),))
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    with pytest.raises(ConfigError, match=r"data\.tokenizer: has a chat template in its folder that "):
        splits(tokenizer=str(tmp_path), vocab_size=400)


def test_episodes_without_instructions_are_refused():
    recording = record([5, 7, 4])
    vars(recording)["tasks"] = ("",) * 3
    with pytest.raises(ConfigError, match=r"data\.instruction_tokens: is set but no training episode has an"):
        splits(recording)


def recorded(folder, tmp_path, **changed):
    sizes = {"state_key": STATE_KEY, "action_key": ACTION_KEY, "state_dim": 3, "action_dim": 2}
    seen = {"image_key": None, "image_size": None, "cache_dir": str(tmp_path / "cache")}
    told = {"instruction_tokens": 12, "vocab_size": 300}
    return lerobot(seed=0, path=str(folder), **sizes, **seen, **{**WINDOWS, **told, **changed})


@pytest.mark.parametrize("index_name", ["task", "__index_level_0__"])
def test_tasks_of_a_lerobot_folder_become_instructions(index_name, tmp_path):
    import pyarrow.parquet as pq

    write_by_hand(tmp_path)
    file = tmp_path / "meta/tasks.parquet"
    pq.write_table(pq.read_table(file).rename_columns(["task_index", index_name]), file)
    data = recorded(tmp_path, tmp_path)
    (held_out,) = np.flatnonzero(held_out_episodes(len(LENGTHS), 0.2))
    assert [words(data, one) for one in data.validation] == [f"task {held_out % 2}"] * LENGTHS[held_out]
    assert {words(data, one) for one in data.train} == {"task 0", "task 1"}


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (None, r"which has no meta/tasks\.parquet with the instructions"),
        ({"task_index": [0], "task": ["task 0"]}, r"which has frames of task 1, which meta/tasks\.parquet does not"),
        ({"task_index": [0, 1], "text": ["a", "b"]}, r"which has no columns task and task_index in"),
        ({"task_index": [0, 1], "task": [3, 4]}, r"which has tasks in meta/tasks\.parquet that are not strings"),
    ],
)
def test_lerobot_folder_with_missing_or_invalid_tasks_is_refused(columns, message, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_by_hand(tmp_path)
    (tmp_path / "meta/tasks.parquet").unlink()
    if columns is not None:
        pq.write_table(pa.table(columns), tmp_path / "meta/tasks.parquet")
    with pytest.raises(ConfigError, match=message):
        recorded(tmp_path, tmp_path)
    assert recorded(tmp_path, tmp_path, instruction_tokens=None).tokenizer is None


def test_demonstrations_have_the_instructions_of_the_simulator(tmp_path):
    from support.reach import Reach

    class Named(Reach):
        def reset(self, seed):
            self.instruction = f"reach goal {seed % 2}"
            return super().reset(seed)

    sizes = {"state_dim": 4, "action_dim": 2, "image_size": None, "episodes": 6, "noise": 0.0, "noisy_share": 0.0}
    made = {"simulator": Named, "simulator_settings": {}, "cache_dir": str(tmp_path)}
    data = demonstrations(seed=0, **sizes, **made, **WINDOWS, instruction_tokens=8, vocab_size=300)
    assert {words(data, one) for one in data.train} == {"reach goal 0", "reach goal 1"}
