"""What ranks tell each other runs nothing, whoever says it."""

import pickle
import re
from pathlib import Path

import pytest

import foundry
from foundry.checkpoint.folder import FileFacts
from foundry.launch.local import run_local
from foundry.parallel.gathering import loads


def touch(path):
    Path(path).touch()


CODE = [eval, exec, getattr, __import__, touch, Path.touch, pickle.loads, run_local, open]
NAMED = [b"cfoundry.__main__\nmain\n.", b"cfoundry.launch.local\nos.system\n.", b"cnot_there\nx\n."]


class Runs:
    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("function", CODE)
def test_code_of_others_is_refused_by_its_name(function, protocol, tmp_path):
    sent = pickle.dumps([1, Runs(function, str(tmp_path / "touched"))], protocol)
    with pytest.raises(pickle.UnpicklingError, match="which is no data"):
        loads(sent)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "named", [b"cfoundry.__main__\nmain\n.", b"cfoundry.launch.local\nos.system\n.", b"cnot_there\nx\n."]
)
def test_nothing_is_imported_or_looked_up_in_a_module(named):
    with pytest.raises(pickle.UnpicklingError, match="which is no data"):
        loads(named)


def test_data_comes_as_it_was_sent():
    value = ({"a": FileFacts(bytes=3, checksum="f")}, [Path("x/y")], {1, 2}, "grüße", None, 2.5, True)
    assert loads(pickle.dumps(value)) == value


def test_no_rank_reads_another_ones_objects_by_any_other_way():
    by_torch = re.compile(r"\b(all_gather|gather|broadcast|scatter|send|recv)_object\w*\(")
    folder = Path(foundry.__file__).parent
    assert [path.name for path in folder.rglob("*.py") if by_torch.search(path.read_text())] == []
