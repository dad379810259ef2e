"""A custom `_target_` that does not exist or takes other arguments is rejected at composition time."""

import os
import subprocess
import sys
from textwrap import dedent
from types import ModuleType, SimpleNamespace

import pytest
from support.examples import long_case, some_of

from foundry.config.checks.static_source import NameNotFound, resolve_parameters
from foundry.config.checks.targets import RUN_ARGUMENTS, check_targets
from foundry.config.schemas.evaluation import Evaluation
from foundry.config.schemas.tracking import Tracking

PARTS = '''
import dataclasses
import functools
import sys
from dataclasses import dataclass, field

import torch_is_not_imported_by_checking
from torch import nn
from own_base import Base, Made


class Model(nn.Module):
    """A model."""

    def __init__(self, *, width, depth=2):
        super().__init__()


class Open(nn.Module):
    def __init__(self, width, **options):
        super().__init__()


class Child(Base):
    pass


class Bare:
    pass


class Sealed(Made):
    def __init__(self, width):
        pass


@dataclass
class Plain:
    width: int
    depth: int = 2
    names: list = field(default_factory=list)


class Maker:
    @classmethod
    def make(cls, width, depth=1):
        return cls()

    @staticmethod
    def build(width):
        return None


def data(*, seed, path, size=3):
    return path


def seedless(*, path):
    return path


def optimizer(*, model, lr, beta=0.9):
    return []


def precise(*, model, lr, precision):
    return []


def schedule(*, max_lr, budget, floor=0.0):
    return None


@functools.cache
def decorated(anything):
    return None


def twice(a):
    return None


if sys.platform == "linux":
    def twice(b):
        return None


def positional(a, b, /, c):
    return None


def many(*values, key=1):
    return None


named = functools.partial(data, size=4)
'''

BASE = """
class Base:
    def __init__(self, height, colour="red"):
        pass


class Meta(type):
    def __call__(cls, *args, **kwargs):
        return None


class Made(metaclass=Meta):
    pass
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder on sys.path with `own_parts`, modules that re-export it, and invalid or dynamic modules."""
    files = {
        "own_parts.py": PARTS,
        "own_base.py": BASE,
        "own_package/__init__.py": "raise SystemExit('executed')\nfrom .inner import Model as Renamed\n",
        "own_package/inner.py": "from own_parts import Model, data\n",
        "own_lazy/__init__.py": "def __getattr__(name):\n    return dict\n",
        "own_star.py": "from own_parts import *\n",
        "own_wrong.py": "def broken(:\n",
        "own_space/part.py": "def data(*, seed):\n    return None\n",
    }
    for name, text in files.items():
        path = tmp_path / "path" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text))
    monkeypatch.syspath_prepend(tmp_path / "path")
    return tmp_path / "path"


def refusals(group, node):
    parts = dict.fromkeys(RUN_ARGUMENTS) | {group: node, "evaluation": Evaluation(), "tracking": Tracking()}
    return [str(violation) for violation in check_targets(SimpleNamespace(**parts))]


WRONG = [
    ("data", {"_target_": "own_prats.data"}, "data._target_: is own_prats.data but there is no module own_prats; "),
    ("data", {"_target_": "own_parts.dta", "path": 1}, "is own_parts.dta but own_parts has no dta; did you mean data?"),
    ("data", {"_target_": "own_package.iner.data"}, "but own_package has no iner; did you mean inner?"),
    ("data", {"_target_": "own_space.prat.data"}, "but own_space has no module prat; did you mean part?"),
    ("data", {"_target_": "own_wrong.broken"}, "own_wrong.py line 1 is not valid Python: "),
    ("data", {"_target_": "own_parts"}, "but that is a module; name a class or function in it"),
    ("data", {"_target_": 3}, "data._target_: is 3 but must be the dotted path of a class or function"),
    ("data", {"_target_": "own parts.x"}, "must be the dotted path of a class or function"),
    ("data", {"_target_": ""}, "must be the dotted path of a class or function"),
    (
        "data",
        {"_target_": "own_parts.data", "path": 1, "sise": 2},
        "data.sise: is not an argument of own_parts.data; did you",
    ),
    ("data", {"_target_": "own_parts.data"}, "data.path: has no value but own_parts.data needs one; give it as +data."),
    (
        "data",
        {"_target_": "own_parts.seedless", "path": 1},
        "which has no argument seed, but the run passes seed by name; it",
    ),
    (
        "model",
        {"_target_": "own_parts.Model", "widht": 1, "width": 2},
        "model.widht: is not an argument of own_parts.Model",
    ),
    ("model", {"_target_": "own_parts.Model"}, "model.width: has no value but own_parts.Model needs one"),
    (
        "model",
        {"_target_": "own_parts.Bare", "width": 1},
        "model.width: is not an argument of own_parts.Bare; it takes no",
    ),
    ("model", {"_target_": "own_parts.Open"}, "model.width: has no value"),
    (
        "model",
        {"_target_": "own_parts.Child", "hieght": 3, "height": 1},
        "did you mean height?; it takes height, colour",
    ),
    (
        "model",
        {"_target_": "own_parts.Plain", "width": 1, "dpeth": 1},
        "did you mean depth?; it takes width, depth, names",
    ),
    ("model", {"_target_": "own_parts.Plain"}, "model.width: has no value"),
    ("model", {"_target_": "own_parts.Maker.make", "wdith": 1, "width": 1}, "did you mean width?"),
    ("model", {"_target_": "own_parts.Maker.mkae", "width": 1}, "but Maker has no mkae; did you mean make?"),
    ("model", {"_target_": "own_parts.Maker.build", "width": 1, "cls": 1}, "model.cls: is not an argument"),
    ("model", {"_target_": "own_package.inner.Model", "widht": 1, "width": 1}, "did you mean width?"),
    ("model", {"_target_": "own_package.Renamed", "widht": 1, "width": 1}, "did you mean width?"),
    (
        "model",
        {"_target_": "own_parts.Model", "width": {"_target_": "own_parts.dta"}},
        "model.width._target_: is own_part",
    ),
    (
        "model",
        {"_target_": "own_parts.Model", "width": [{"_target_": "own_parts.Plain"}]},
        "model.width.0.width: has no",
    ),
    ("model", {"_target_": "own_parts.Model", "_args_": [1]}, "model._args_: has 1 value but own_parts.Model takes 0"),
    ("optimizer", {"_target_": "own_parts.optimizer", "bta": 1}, "did you mean beta?; it takes model, lr, beta"),
    (
        "optimizer",
        {"_target_": "torch.optim.AdamW"},
        "which has no argument model, but the run passes model, lr by name",
    ),
    ("optimizer", {"_target_": "torch.optim.AdamWW"}, "but torch.optim has no AdamWW; did you mean AdamW?"),
    ("scheduler", {"_target_": "own_parts.schedule", "flor": 1}, "did you mean floor?"),
    ("objective", {"_target_": "foundry.objectives.next_token.NextTokens"}, "did you mean NextToken?"),
    ("objective", {"_target_": "foundry.NextTokens"}, "but foundry has no NextTokens; did you mean NextToken?"),
    ("scheduler", {"_target_": "foundry.schedules.WSD"}, "write foundry.schedules.WSD.from_durations"),
    ("scheduler", {"_target_": "foundry.schedules"}, "that is a namespace; name a class or function in it"),
]


@pytest.mark.parametrize(("group", "node", "part"), WRONG, ids=[str(node) for _, node, _ in WRONG])
@pytest.mark.usefixtures("own")
def test_invalid_targets_and_arguments_give_a_one_line_error(group, node, part):
    (line,) = refusals(group, node)
    assert part in line
    assert line.startswith(f"{group}.")


RIGHT = [
    ("data", {"_target_": "own_parts.data", "path": 1}),
    ("data", {"_target_": "own_parts.data", "path": 1, "num_workers": 3}),
    ("data", {"_target_": "own_space.part.data"}),
    ("data", {"_target_": "own_parts.named", "anything": 1}),
    ("model", {"_target_": "own_parts.Model", "width": 1, "init_from": "x"}),
    ("model", {"_target_": "own_parts.Open", "width": 1, "other": 2}),
    ("model", {"_target_": "own_parts.Sealed", "whatever": 1}),
    ("model", {"_target_": "own_parts.decorated", "else": 1}),
    ("model", {"_target_": "own_parts.twice", "b": 1}),
    ("model", {"_target_": "own_parts.positional", "c": 1, "_args_": [1, 2]}),
    ("model", {"_target_": "own_parts.many", "_args_": [1, 2, 3]}),
    ("model", {"_target_": "own_parts.Child", "_args_": [1]}),
    ("model", {"_target_": "own_lazy.Anything", "x": 1}),
    ("model", {"_target_": "own_star.Model", "x": 1}),
    ("model", {"_target_": "own_parts.Model", "width": {"_target_": "own_parts.Plain", "_partial_": True}}),
    ("model", {"_target_": "own_parts.Model", "width": {"_target_": "nowhere.X"}, "_recursive_": False}),
    ("model", {"_target_": "__main__.Model", "x": 1}),
    ("model", {"_target_": "torch.nn.Linear", "in_features": 1, "out_features": 1}),
    ("model", {"_target_": "transformers.AutoModelForCausalLM.from_pretrained", "anything": 1}),
    ("model", {"_target_": "transformers.LlamaForCausalLM", "config": 1}),
    ("model", {"_target_": "builtins.dict", "x": 1}),
    ("model", {"_target_": "math.sqrt", "x": 1}),
    ("optimizer", {"_target_": "own_parts.optimizer"}),
    ("optimizer", {"_target_": "own_parts.precise"}),
    ("scheduler", {"_target_": "own_parts.schedule", "warmup": "0.05", "min_lr": 1e-5}),
    ("scheduler", {"_target_": "foundry.optim.schedules.WSD.from_durations", "warmup": 3}),
]


@pytest.mark.parametrize(("group", "node"), RIGHT, ids=[str(node) for _, node in RIGHT])
@pytest.mark.usefixtures("own")
def test_valid_or_undecidable_targets_are_accepted(group, node):
    assert refusals(group, node) == []


@pytest.mark.parametrize(
    "path",
    [
        *("torch.zeros", "torch.tensor", "torch.float32", "torch.nn.functional.cross_entropy", "torch.optim.SGD"),
        *("torch.optim.lr_scheduler.OneCycleLR", "torch.distributions.Normal", "numpy.array", "os.path.join"),
        *("collections.OrderedDict", "functools.partial", "datetime.datetime.now", "pathlib.Path", "json.loads"),
        *("diffusers.UNet2DModel", "diffusers.DDPMScheduler.from_config", "optuna.create_study"),
        *("pyarrow.parquet.ParquetFile", "pyarrow.json.read_json"),
        *("sklearn.linear_model.Ridge", "matplotlib.pyplot.plot", "hydra.utils.instantiate"),
        long_case("mlflow.start_run"),
        *(
            "transformers.AutoTokenizer.from_pretrained",
            "tokenizers.Tokenizer.from_file",
            "safetensors.torch.load_file",
        ),
    ],
)
def test_targets_in_installed_packages_resolve(path):
    pytest.importorskip(path.partition(".")[0])  # Optuna is optional
    resolve_parameters(path)


@pytest.mark.parametrize(
    ("package", "module"),
    [("torch", "optim"), ("torch", "distributed"), ("transformers", "models"), ("numpy", "linalg"), ("scipy", "stats")],
)
def test_misspelled_module_of_a_package_with_lazy_names_is_reported(package, module):
    for number in range(1, len(module)):
        with pytest.raises(NameNotFound, match=f"^{package} has no ") as error:
            resolve_parameters(f"{package}.{module[:number] + module[number + 1 :]}.Anything")
        assert module in error.value.candidates


def refusal(path):
    try:
        resolve_parameters(path)
    except NameNotFound as error:
        return str(error)
    return None


@pytest.mark.filterwarnings("ignore:`scipy.odr` is deprecated:DeprecationWarning")  # getattr imports each submodule
@pytest.mark.parametrize("package", some_of(["torch", "numpy", "scipy", "mlflow", "optuna"], "numpy", "optuna"))
def test_public_names_are_not_reported_as_misspelled_modules(package):
    module = pytest.importorskip(package)  # Optuna is optional
    public = [name for name in dir(module) if not name.startswith("_")]
    names = [name for name in public if isinstance(getattr(module, name), (type, ModuleType))]
    assert [name for name in names if refusal(f"{package}.{name}.anything") == f"{package} has no {name}"] == []


@pytest.mark.usefixtures("own")
def test_module_created_at_run_time_is_accepted(monkeypatch):
    monkeypatch.setitem(sys.modules, "own_parts.made", ModuleType("own_parts.made"))
    monkeypatch.setitem(sys.modules, "made_here", ModuleType("made_here"))
    assert resolve_parameters("made_here.anything") is None


def test_changed_source_file_is_parsed_again(own):
    with pytest.raises(NameNotFound):
        resolve_parameters("own_parts.later")
    (own / "own_parts.py").write_text("def later(*, width):\n    return width\n")
    assert resolve_parameters("own_parts.later").names == ("width",)


def test_composition_reports_a_wrong_argument_without_importing_the_part(own):
    yaml = own.parent / "conf" / "model" / "mine.yaml"
    yaml.parent.mkdir(parents=True)
    yaml.write_text("_target_: own_package.inner.Model\nwidth: 3\ndepht: 4\n")
    code = (
        "import sys; from foundry.commands.main import main\n"
        "try: main()\n"
        "finally: assert not {'torch', 'own_parts', 'own_package', 'transformers'} & set(sys.modules)\n"
    )
    overrides = ["--config-dir", str(yaml.parent.parent), "model=mine", "--cfg", "job"]
    done = subprocess.run(
        [sys.executable, "-c", code, *overrides],
        env={**os.environ, "PYTHONPATH": f"{own}:{':'.join(sys.path)}"},
        capture_output=True,
        text=True,
        cwd=own,
    )
    assert (done.returncode, done.stderr) == (
        2,
        "model.depht: is not an argument of own_package.inner.Model; did you mean depth?; it takes width, depth\n",
    )
