"""Public names of foundry's parts are unambiguous and equivalent to the older paths."""

import ast
import inspect
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import yaml
from hydra.utils import get_class, get_object
from support.composition import compose, configure

import foundry
from foundry.commands.library import compose as compose_config
from foundry.config.build import build
from foundry.config.checks.static_source import NameNotFound, resolve_parameters
from foundry.config.composition.job_overrides import key_and_value
from foundry.config.composition.store import GROUPS, group_schemas, schemas_in
from foundry.config.record.frozen import hash_config, load_config, plain, read_recorded, save_config
from foundry.config.record.recorded import foreign_parts, read_settings
from foundry.config.record.resume_compat import differences
from foundry.config.schemas import built_in_evaluators, built_in_trackers
from foundry.core import moved_modules, part_names
from foundry.core.part_names import NAMESPACES, PARTS, current_path, find_part, names_in, original_path, public_name
from foundry.sweeps.job import Job
from foundry.tasks.robots.data.simulated import simulator_identity

PACKAGE = Path(foundry.__file__).parent
FOLDERS = {
    *("checkpoint", "commands", "config", "core", "data", "engine", "environments", "evaluators", "generation"),
    *("launch", "models", "objectives", "optim", "parallel", "planning", "rehearsal", "rollouts", "run_dir"),
    *("simulators", "sweeps", "tasks", "tracking", "training"),
}
"""Names of folders that no public name may have; some folders do not exist."""


def modules():
    """Return the dotted names of all modules and packages."""
    paths = (path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py"))
    return {".".join(("foundry", *(part for part in path.parts if part != "__init__"))) for path in paths}


def targets():
    """Return the default `_target_` of each schema, if it is in foundry."""
    schemas = {f"{group}.{name}": schema for group in GROUPS for name, schema in group_schemas(group).items()}
    schemas |= {
        schema.__name__: schema for module in (built_in_evaluators, built_in_trackers) for schema in schemas_in(module)
    }
    found = {key: item.default for key, schema in schemas.items() for item in fields(schema) if item.name == "_target_"}
    return {key: path for key, path in found.items() if isinstance(path, str) and path.startswith("foundry.")}


def test_public_names_are_unambiguous():
    names = [*PARTS, *NAMESPACES]
    taken = {name.lower() for name in modules()} | {f"foundry.{folder}" for folder in FOLDERS}
    assert len({name.lower() for name in names}) == len(names)
    assert [name for name in names if name.lower() in taken] == []
    assert len(set(PARTS.values())) == len(PARTS)


def test_every_schema_has_a_public_name():
    assert len(targets()) > 40
    assert {key: path for key, path in targets().items() if path.removesuffix(".from_durations") not in PARTS} == {}


@pytest.mark.parametrize("name", PARTS)
def test_public_name_resolves_to_its_class_or_function(name):
    part = get_object(name)
    assert inspect.isclass(part) or inspect.isfunction(part)
    assert part is get_object(PARTS[name]) is find_part(name)
    assert part.__name__ == name.rpartition(".")[2]
    assert resolve_parameters(name) == resolve_parameters(PARTS[name])


def test_public_names_work_as_attributes_and_imports():
    scope = {}
    exec("from foundry import GRPO, schedules\nfrom foundry.schedules import Linear", scope)
    exec("import foundry.rewards\nPython = foundry.rewards.Python", scope)
    assert scope["GRPO"] is get_class("foundry.GRPO") is get_class("foundry.objectives.grpo.GRPO")
    assert scope["Linear"] is scope["schedules"].Linear is get_class("foundry.schedules.Linear")
    assert scope["Python"] is get_class("foundry.environments.python.Python")
    assert {"GRPO", "schedules", "run"} <= set(dir(foundry))
    assert {"Linear", "WSD"} <= set(dir(scope["schedules"]))
    for module in (foundry, scope["schedules"]):
        with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
            module.Nothing  # noqa: B018


def test_import_foundry_imports_no_parts():
    listed = "import sys, foundry, foundry.schedules; print(*sorted(m for m in sys.modules if m.startswith('foundry')))"
    done = subprocess.run([sys.executable, "-c", listed], capture_output=True, text=True, check=True)
    own = {"foundry", "foundry.core", "foundry.core.moved_modules", "foundry.core.part_names"}
    assert set(done.stdout.split()) == own | set(NAMESPACES)


def stub(path):
    """Return the import path of each name in a stub file."""
    imports = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ImportFrom)]
    return {alias.asname: f"{node.module}.{alias.name}" for node in imports for alias in node.names}


def test_stub_files_match_the_table_of_names():
    for owner in ("foundry", *NAMESPACES):
        known = {name: current_path(f"{owner}.{name}") for name in names_in(owner)}
        if owner == "foundry":
            known |= {name.rpartition(".")[2]: name for name in NAMESPACES}
            known |= {name: f"{foundry._PLACES[name]}.{name}" for name in foundry.__all__}
        file = PACKAGE / "__init__.pyi" if owner == "foundry" else PACKAGE.parent / f"{owner.replace('.', '/')}.pyi"
        assert stub(file) == known


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("foundry.objectives.grpo.GRPO", "foundry.GRPO"),
        ("foundry.optim.schedules.WSD.from_durations", "foundry.schedules.WSD.from_durations"),
        ("foundry.environments.matching.ExactMatch", "foundry.rewards.ExactMatch"),
        ("foundry.evaluators.exact_match.ExactMatch", "foundry.evals.ExactMatch"),
        ("foundry.GRPO", "foundry.GRPO"),
        ("foundry.objectives.grpo.GRPOs", "foundry.objectives.grpo.GRPOs"),
        ("foundry.objectives.grpo", "foundry.objectives.grpo"),
        ("mypkg.foundry.objectives.grpo.GRPO", "mypkg.foundry.objectives.grpo.GRPO"),
        ("mypkg.Mine", "mypkg.Mine"),
        ("", ""),
    ],
)
def test_public_name_maps_older_paths_and_keeps_others(path, name):
    assert public_name(path) == name
    assert original_path(name) == original_path(path)
    assert public_name(original_path(path)) == name


def test_part_of_a_moved_module_keeps_public_name_and_first_path(monkeypatch):
    monkeypatch.setattr(moved_modules, "MOVED", {"foundry.objectives.sft": "foundry.run_dir.names"})
    monkeypatch.setattr(part_names, "_NAMES", part_names._names())
    for path in ("foundry.SFT", "foundry.objectives.sft.SFT", "foundry.run_dir.names.SFT"):
        assert public_name(path) == "foundry.SFT"
        assert original_path(path) == "foundry.objectives.sft.SFT"
        assert current_path(path) == "foundry.run_dir.names.SFT"
    monkeypatch.setattr("foundry.run_dir.names.SFT", int, raising=False)
    assert foundry.SFT is int


def test_subclass_of_an_imported_part_has_the_parameters_of_its_parent(tmp_path, monkeypatch):
    for name, line in {
        "by_name": "from foundry import PolicyDiT",
        "by_path": "from foundry.models.policy_dit import PolicyDiT",
    }.items():
        (tmp_path / f"{name}.py").write_text(f"{line}\n\n\nclass Mine(PolicyDiT):\n    pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert (
        resolve_parameters("by_name.Mine")
        == resolve_parameters("by_path.Mine")
        == resolve_parameters("foundry.PolicyDiT")
    )
    assert resolve_parameters("by_name.Mine") is not None


def test_library_page_lists_every_public_name():
    page = (PACKAGE.parent / "docs" / "library.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `foundry")]
    listed = [f"{row[0].strip('| `')}.{name.strip('` |')}" for row in rows for name in row[2].split(", ")]
    assert sorted(listed) == sorted(PARTS)


@pytest.mark.parametrize(
    ("path", "message", "near"),
    [
        ("foundry.GRP0", "foundry has no GRP0", "GRPO"),
        ("foundry.schedule.Linear", "foundry has no schedule", "foundry.schedules"),
        ("foundry.schedules.Linaer.from_durations", "foundry.schedules has no Linaer", "Linear"),
        ("foundry.schedules", "that is a namespace; name a class or function in it", "Linear"),
    ],
)
def test_misspelled_public_name_error_lists_candidates(path, message, near):
    with pytest.raises(NameNotFound) as caught:
        resolve_parameters(path)
    assert str(caught.value) == message
    assert near in caught.value.candidates


DIT = "foundry.models.dit.DiT"
OLD_AND_NEW = {
    "a key": (
        "objective._target_=foundry.objectives.next_token.NextToken",
        "objective._target_=foundry.NextToken",
    ),
    "a mapping": (
        "+evaluation.evaluators.e={_target_: foundry.evaluators.exact_match.ExactMatch, max_new_tokens: 4}",
        "+evaluation.evaluators.e={_target_: foundry.evals.ExactMatch, max_new_tokens: 4}",
    ),
    "a method": (
        "scheduler._target_=foundry.optim.schedules.WSD.from_durations",
        "scheduler._target_=foundry.schedules.WSD.from_durations",
    ),
    "a part in a user's part": (
        f"+tracking.trackers.t={{_target_: builtins.dict, inner: [{{_target_: {DIT}, _partial_: true}}]}}",
        "+tracking.trackers.t={_target_: builtins.dict, inner: [{_target_: foundry.DiT, _partial_: true}]}",
    ),
}


@pytest.mark.parametrize(("old", "new"), OLD_AND_NEW.values(), ids=OLD_AND_NEW)
def test_overrides_with_old_and_public_names_give_equal_configs(old, new):
    assert plain(configure(old)) == plain(configure(new))
    assert hash_config(configure(old)) == hash_config(configure(new))


def test_older_path_in_an_environment_variable_is_accepted(monkeypatch):
    monkeypatch.setenv("PART", "foundry.objectives.next_token.NextToken")
    assert compose("objective._target_='${oc.env:PART}'").objective._target_ == "foundry.NextToken"


def test_custom_part_keeps_its_path():
    config = configure("+tracking.trackers.t={_target_: builtins.dict, foundry.models.dit.DiT: 1}")
    assert config.tracking.trackers["t"] == {"_target_": "builtins.dict", "foundry.models.dit.DiT": 1}


def test_user_options_may_name_older_paths(tmp_path):
    for name, lines in {
        "derived": "defaults: [next_token]\n_target_: foundry.objectives.next_token.NextToken\n",
        "whole": "_target_: foundry.objectives.next_token.NextToken\nsample_tokens: 8\n",
    }.items():
        (tmp_path / "objective").mkdir(exist_ok=True)
        (tmp_path / "objective" / f"{name}.yaml").write_text(lines)
    derived, whole = (compose_config([f"objective={name}"], config_dir=tmp_path) for name in ("derived", "whole"))
    assert derived == compose_config(["objective=next_token"])
    assert whole.objective == {"_target_": "foundry.NextToken", "sample_tokens": 8}
    assert type(build(whole.objective)) is type(build(derived.objective))


def test_recorded_run_with_older_paths_loads_without_trust(tmp_path):
    config = configure(OLD_AND_NEW["a mapping"][1], "experiment=fetch_push")
    file = save_config(config, tmp_path)
    text = file.read_text()
    for name, path in PARTS.items():
        text = text.replace(f"_target_: {name}\n", f"_target_: {path}\n").replace(f" {name}.from", f" {path}.from")
    assert text.count("foundry.schedules") == text.count("foundry.evals") == 0
    file.write_text(text)
    assert load_config(tmp_path) == config
    assert list(foreign_parts(read_settings(file, "run"))) == []
    assert read_recorded(tmp_path) == plain(config)
    assert list(differences(yaml.safe_load(text), plain(config), config)) == []


def test_sweep_job_ids_are_equal_for_old_and_public_names():
    for old, new in OLD_AND_NEW.values():
        assert Job(swept=(old, "hparams.lr=1")).id == Job(swept=("hparams.lr=1", new)).id
        assert key_and_value(old) == key_and_value(new)
    name = "tracking.run_name=foundry.models.dit.DiT"
    assert key_and_value(name)[1] == DIT
    assert Job(swept=("hparams.lr=1e-3",)).id == "adcd5f427d2aaa5e"
    assert Job(swept=(OLD_AND_NEW["a key"][1],)).id == "0eaace1681d1821c"


def test_simulator_identity_is_equal_for_old_and_public_names():
    old, new = (
        simulator_identity({"_target_": path}) for path in ("foundry.simulators.tabletop.Tabletop", "foundry.Tabletop")
    )
    assert old == new
    assert old["simulator"] == {"_target_": "foundry.simulators.tabletop.Tabletop"}
    assert old["sources"] != ""
