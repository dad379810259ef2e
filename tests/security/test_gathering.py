"""Objects exchanged between ranks are unpickled as data only; pickled code is rejected."""

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
def test_loads_rejects_pickled_calls(function, protocol, tmp_path):
    sent = pickle.dumps([1, Runs(function, str(tmp_path / "touched"))], protocol)
    with pytest.raises(pickle.UnpicklingError, match="which is not a data type"):
        loads(sent)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "named", [b"cfoundry.__main__\nmain\n.", b"cfoundry.launch.local\nos.system\n.", b"cnot_there\nx\n."]
)
def test_loads_rejects_global_names_without_importing_modules(named):
    with pytest.raises(pickle.UnpicklingError, match="which is not a data type"):
        loads(named)


def test_loads_round_trips_plain_data():
    value = ({"a": FileFacts(bytes=3, checksum="f")}, [Path("x/y")], {1, 2}, "grüße", None, 2.5, True)
    assert loads(pickle.dumps(value)) == value


def test_torch_object_collectives_are_unused():
    by_torch = re.compile(r"\b(all_gather|gather|broadcast|scatter|send|recv)_object\w*\(")
    folder = Path(foundry.__file__).parent
    assert [path.name for path in folder.rglob("*.py") if by_torch.search(path.read_text())] == []
