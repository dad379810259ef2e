"""Settings of built-in parts in untyped mappings are checked for type and bounds."""

from dataclasses import MISSING, fields

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.composition import configure
from support.examples import examples

from foundry.config.checks.static_source import resolve_parameters
from foundry.config.composition.plain_nodes import check_node
from foundry.config.composition.store import evaluator_schemas, schemas_in
from foundry.config.record.recorded import built_in_named_parts
from foundry.config.schemas import built_in_trackers
from foundry.config.schemas.evaluation import Evaluation
from foundry.config.schemas.tracking import Tracking
from foundry.core.errors import ConfigError

SCHEMAS = [*evaluator_schemas(), *schemas_in(built_in_trackers)]
SETTINGS = [(schema, item) for schema in SCHEMAS for item in fields(schema) if item.name != "_target_"]
ANSWERS, SUCCESS = "evaluation.evaluators.answers", "evaluation.evaluators.success"
BOARD, WANDB = "tracking.trackers.tensorboard", "tracking.trackers.wandb"
CHOSEN = {
    ANSWERS: ["evaluation=answers", "data=arithmetic"],
    SUCCESS: ["hparams=policy", "debug=fast"],
    BOARD: ["tracking=tensorboard"],
    WANDB: ["tracking=wandb"],
    "model.config": ["model=hf_gpt2"],
}


@pytest.mark.parametrize(
    ("key", "override", "message"),
    [
        (ANSWERS, "max_new_tokens=-1", "max_new_tokens: is -1 but must be at least 1"),
        (ANSWERS, "max_new_tokens=2.5", "max_new_tokens: is 2.5 but must be a whole number"),
        (ANSWERS, "max_new_tokens='5'", "max_new_tokens: is 5 but must be a whole number"),
        (ANSWERS, "max_new_tokens=null", "max_new_tokens: is null but must be a value"),
        (ANSWERS, "+max_samples=0", "max_samples: is 0 but must be at least 1"),
        (ANSWERS, "+per_gpu_batch_size=true", "per_gpu_batch_size: is True but must be a whole number"),
        (ANSWERS, "+torchmetrics=5", "torchmetrics: is 5 but must be a mapping"),
        (ANSWERS, "+metrics=5", "metrics: is 5 but must be a list of names"),
        (ANSWERS, "+data=5", "data: is 5 but the run sets it; leave it out"),
        (ANSWERS, "+max_tokens=5", "max_tokens: is not an argument of foundry.evals.ExactMatch"),
        (SUCCESS, "draw=abc", "draw: is abc but must be true or false"),
        (SUCCESS, "draw=-1", "draw: is -1 but must be true or false"),
        (SUCCESS, "draw=null", "draw: is null but must be a value"),
        (BOARD, "folder=null", "folder: is null but must be a value"),
        (BOARD, "folder=5", "folder: is 5 but must be a string"),
        (BOARD, "folder=../other", "folder: is ../other but must be a folder in the run directory"),
        (BOARD, "folder=/tmp", "folder: is /tmp but must be a folder in the run directory"),
        (BOARD, "flush_seconds=abc", "flush_seconds: is abc but must be a number"),
        (BOARD, "flush_seconds=0", "flush_seconds: is 0 but must be above 0"),
        (BOARD, "flush_seconds=nan", "flush_seconds: is nan but must be above 0"),
        (WANDB, "mode=on", "mode: is on but must be online, offline or null"),
        (WANDB, "tags=[1]", "tags: is [1] but must be a list of strings"),
        (WANDB, "entity=true", "entity: is True but must be a string"),
        ("model.config", "n_layer=-1", "n_layer: is -1 but must be at least 1"),
        ("model.config", "n_layer=1000000000", "n_layer: is 1000000000 but must be at most 1,000"),
        ("model.config", "n_embd=abc", "n_embd: is abc but must be a whole number"),
        ("model.config", "n_head=true", "n_head: is True but must be a whole number"),
        ("model.config", "+n_positions=0", "n_positions: is 0 but must be at least 1"),
    ],
)
def test_invalid_value_in_a_plain_mapping_is_rejected(key, override, message):
    added, name = ("+", override[1:]) if override.startswith("+") else ("", override)
    with pytest.raises(ConfigError) as refused:
        configure(*CHOSEN[key], f"{added}{key}.{name}")
    assert f"{key}.{message}" in str(refused.value)


def test_built_in_part_nested_in_a_custom_part_is_checked():
    inner = "{_target_: foundry.Transformer, num_layers: -1, num_heads: [2]}"
    with pytest.raises(ConfigError) as refused:
        configure(f"+evaluation.stop_rules.mine={{_target_: collections.Counter, model: {inner}}}")
    lines = str(refused.value).splitlines()
    assert "evaluation.stop_rules.mine.model.num_layers: is -1 but must be at least 1" in lines
    assert "evaluation.stop_rules.mine.model.num_heads: is [2] but must be a whole number" in lines


WRONG = st.sampled_from(["x", "", -1, 0, 2**70, 1.5, True, None, [], [1], {}, {"a": 1}, float("nan"), float("inf")])


@settings(max_examples=examples(100), deadline=None)
@given(setting=st.sampled_from(SETTINGS), value=WRONG | st.integers() | st.floats() | st.text(max_size=4))
def test_accepted_values_have_the_declared_type_and_bounds(setting, value):
    schema, item = setting
    node = {"_target_": schema._target_, item.name: value}
    found = list(check_node(node, "tracking.trackers.mine"))
    assert [violation.key for violation in found] in ([], [f"tracking.trackers.mine.{item.name}"])
    if found:
        assert len(str(found[0]).splitlines()) == 1
        return
    text, bounds = str(item.type), item.metadata["bounds"]
    kinds = {
        "int": int,
        "float": (int, float),
        "str": str,
        "bool": bool,
        "None": type(None),
        "list": list,
        "dict": dict,
    }
    kinds["InstructionChoice"] = str
    assert any(name in text and isinstance(value, kind) for name, kind in kinds.items())
    assert isinstance(value, bool) == (isinstance(value, bool) and "bool" in text)
    if bounds and value is not None:
        assert bounds.get("ge", value) <= value <= bounds.get("le", value)
        assert "gt" not in bounds or value > bounds["gt"]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda schema: schema.__name__)
def test_plain_schema_fields_match_the_parameters_of_the_part(schema):
    takes = resolve_parameters(schema._target_)
    own = {item.name: item for item in fields(schema) if item.name != "_target_"}
    given = {*Evaluation.offered, *Tracking.offered}
    assert own.keys() <= set(takes.names) <= own.keys() | given
    assert not list(check_node({"_target_": schema._target_, **_defaults(own)}, "tracking.trackers.mine"))


def _defaults(own):
    values = {name: item.default for name, item in own.items() if item.default is not MISSING}
    plain = {name: getattr(value, "value", value) for name, value in values.items()}
    return {name: value for name, value in plain.items() if not str(value).startswith("${")}


def test_named_evaluators_and_trackers_have_schemas():
    assert set(built_in_named_parts()) <= {schema._target_ for schema in SCHEMAS}
