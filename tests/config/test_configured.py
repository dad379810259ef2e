"""`configured_by`: parts that take their settings as one schema object or as keywords."""

import inspect
from dataclasses import dataclass, field, fields

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import foundry
from foundry.config.build import build
from foundry.config.checks.static_source import resolve_parameters
from foundry.config.composition.store import GROUPS, evaluator_schemas, group_schemas, schemas_in
from foundry.config.configured import configured_by
from foundry.config.schemas import built_in_trackers
from foundry.config.schemas.objective import SFT
from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class Oven:
    _target_: str = "kitchen.bake"
    heat: float = setting(180.0, "in degrees Celsius", gt=0)
    seed: int = setting("${hparams.seed}", "of the crumbs", alone=0)
    dough: str = setting("${data.path}", "file of the dough")
    tins: list[str] = setting(list, "one name each")


@dataclass(frozen=True, kw_only=True)
class Tray:
    holes: int = setting(6, "for a muffin each")


@dataclass(frozen=True, kw_only=True)
class Kitchen:
    """A schema shared by several parts: `_target_` has no default."""

    _target_: str
    init_from: str | None = setting(None, "for the builder")
    tray: Tray = field(default_factory=Tray)


@configured_by(Kitchen)
def furnish(settings: Kitchen) -> Kitchen:
    return settings


@configured_by(Oven)
def bake(settings: Oven, *, minutes: int = 30) -> tuple[Oven, int]:
    return settings, minutes


class Baker:
    @configured_by(Oven)
    def __init__(self, settings: Oven, *, dough: str = "given") -> None:
        self.settings, self.dough = settings, dough

    @classmethod
    @configured_by(Oven)
    def of(cls, settings: Oven) -> "Baker":
        return cls(settings)


class Apprentice(Baker):
    def __init__(self, *, speed: int = 1, **rest: object) -> None:
        super().__init__(**rest)
        self.speed = speed


def test_keywords_and_settings_object_are_equivalent():
    settings = Oven(heat=200.0, seed=0, dough="a")
    assert bake(heat=200.0, dough="a") == bake(settings) == bake(settings=settings) == (settings, 30)
    assert bake(settings, minutes=5)[1] == bake(dough="a", minutes=5)[1] == 5
    assert Baker.of(heat=200.0, dough="a").settings == Baker.of(settings).settings == settings


def test_own_keyword_of_a_function_shadows_the_setting():
    assert Baker(heat=1.0, dough="mine").dough == "mine"
    assert Baker(heat=1.0).dough == "given"


def test_subclass_forwards_setting_keywords():
    baker = Apprentice(speed=2, heat=1.0)
    assert (baker.speed, baker.settings.heat) == (2, 1.0)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({}, "bake() missing required keyword argument: dough"),
        ({"dough": "a", "heta": 1}, "unexpected keyword argument 'heta'"),
        (
            {"settings": {"dough": "a"}},
            "takes an object of Oven, or its fields as keyword arguments, not {'dough': 'a'}",
        ),
        ({"settings": Oven(), "heat": 3.0}, "unexpected keyword argument 'heat'"),
    ],
)
def test_invalid_calls_of_a_configured_part_raise_type_errors(keywords, message):
    with pytest.raises(TypeError) as error:
        bake(**keywords)
    assert message in str(error.value)


def test_signature_of_a_configured_part_lists_the_schema_fields():
    parameters = inspect.signature(bake).parameters
    assert list(parameters) == ["minutes", "heat", "seed", "dough", "tins"]
    assert (parameters["seed"].default, parameters["dough"].default) == (0, inspect.Parameter.empty)
    assert list(inspect.signature(Baker).parameters) == ["dough", "heat", "seed", "tins"]


@pytest.mark.parametrize("tray", [{"holes": 12}, Tray(holes=12)])
def test_mapping_converts_to_the_nested_schema_dataclass(tray):
    assert furnish(tray=tray).tray == Tray(holes=12)
    assert furnish().tray == Tray()


def test_builder_fields_are_rejected_as_keywords():
    with pytest.raises(TypeError, match="unexpected keyword argument 'init_from'"):
        furnish(init_from="run")


@hypothesis_settings(max_examples=20, deadline=None)
@given(st.fixed_dictionaries({}, optional={"sample_tokens": st.integers(1, 9), "temperature": st.floats(0, 2)}))
def test_build_passes_schema_fields_to_the_part(values):
    settings = {"z_loss_coefficient": 0.0, "seed": 0, **values}
    assert build(SFT(**settings)).settings == SFT(**settings)


NOT_PARSED = {
    *(f"foundry.{name}" for name in ("ActionRegression", "DiffusionPolicy", "FlowPolicy")),
    *(f"foundry.schedules.{name}.from_durations" for name in ("Constant", "Cosine", "InverseSquareRoot", "Linear")),
}
"""Parts that the parser does not resolve: inherited class methods, and `configured_by` of a schema with a dot."""


def configured_parts():
    """Return each schema whose default `_target_` is in foundry, with this target."""
    schemas = {schema for group in GROUPS for schema in group_schemas(group).values()}
    schemas |= {*evaluator_schemas(), *schemas_in(built_in_trackers)}
    targets = {schema: next((f.default for f in fields(schema) if f.name == "_target_"), None) for schema in schemas}
    own = {schema: target for schema, target in targets.items() if str(target).startswith("foundry.")}
    return sorted(own.items(), key=lambda pair: pair[1])


@pytest.mark.parametrize(("schema", "target"), configured_parts(), ids=lambda value: getattr(value, "__name__", value))
def test_parsed_parameters_match_the_imported_signature(schema, target):
    """Holds for the part of each schema, whether or not `configured_by` adds parameters; NOT_PARSED is excluded."""
    from hydra.utils import get_object

    takes, parameters = resolve_parameters(target), inspect.signature(get_object(target)).parameters
    assert (takes is None) == (target in NOT_PARSED)
    if takes is None:
        return
    if takes.has_var_keyword:
        assert takes.required <= set(takes.names)
        assert any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
        return
    assert set(takes.names) == set(parameters)
    assert takes.required == {name for name, item in parameters.items() if item.default is inspect.Parameter.empty}


def test_objective_accepts_settings_object_or_keywords():
    settings = SFT(z_loss_coefficient=0.0, seed=0, sample_tokens=3)
    assert foundry.SFT(sample_tokens=3).settings == foundry.SFT(settings).settings == settings
