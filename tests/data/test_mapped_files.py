import pickle
import subprocess
import sys

import numpy as np
import pytest

from foundry.data.conversations.examples import Examples
from foundry.data.corpora.token_sequences import TokenSequences
from foundry.data.loader import _PositionedReader
from foundry.data.order import GlobalOrder


@pytest.fixture
def tokens(tmp_path):
    np.save(tmp_path / "tokens.npy", np.arange(100_000, dtype=np.uint16))
    return np.load(tmp_path / "tokens.npy", mmap_mode="r")


def test_memory_mapped_dataset_is_pickled_by_path(tokens):
    order = GlobalOrder(num_samples=9999, fingerprint="f", seed=1)
    reader = _PositionedReader(TokenSequences(tokens, 10), order)
    expected = reader.__getitems__(range(8, 12))
    content = pickle.dumps(reader)
    assert len(content) < 2000
    again = pickle.loads(content)
    assert isinstance(again.dataset.tokens, np.memmap)
    for name, tensor in again.__getitems__(range(8, 12)).items():
        assert tensor.equal(expected[name])


@pytest.mark.parametrize("part", [slice(10, 90), slice(None, None, -1), slice(None)])
def test_slice_of_a_memory_map_is_pickled_by_value(tokens, part):
    again = pickle.loads(pickle.dumps(TokenSequences(tokens[part], 10)))
    assert np.array_equal(again.tokens, tokens[part])


def test_memory_mapped_examples_are_pickled_by_path(tokens):
    examples = Examples(tokens, np.ones(100_000, np.bool_), np.array([0, 40_000, 100_000]))
    again = pickle.loads(pickle.dumps(examples))
    assert isinstance(again.tokens, np.memmap)
    assert again.batch([1])["targets"].equal(examples.batch([1])["targets"])


_SPAWNED = """
import multiprocessing, sys
import numpy as np
from foundry.data.loader import Loader
from foundry.data.order import GlobalOrder
from foundry.data.corpora.token_sequences import TokenSequences

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    dataset = TokenSequences(np.load(sys.argv[1], mmap_mode="r"), 10)
    order = GlobalOrder(num_samples=len(dataset), fingerprint="f", seed=1)
    options = {"dataset": dataset, "order": order, "batch_size_at": lambda samples: 4, "per_gpu_batch_size": 4}
    ahead, here = Loader(**options, num_workers=1), Loader(**options)
    for _ in range(3):
        (one,), (other,) = ahead.next_window().microbatches, here.next_window().microbatches
        assert one["tokens"].equal(other["tokens"])
"""


@pytest.mark.long
def test_spawned_workers_read_the_same_batches(tokens, tmp_path):
    script = tmp_path / "spawned.py"
    script.write_text(_SPAWNED)
    subprocess.run([sys.executable, str(script), tokens.filename], check=True, timeout=120)
