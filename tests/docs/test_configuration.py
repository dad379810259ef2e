"""docs/configuration.md and docs/names.md match the schemas, and documented error messages are current."""

import functools
import json
import re
import shlex
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest
from support.composition import compose
from support.scripts import ROOT, load_script

from foundry.config.composition.compose import config_dir
from foundry.config.composition.store import group_schemas
from foundry.config.diagnostics.flags import check_flags
from foundry.config.diagnostics.other_frameworks import names
from foundry.config.schemas.launcher import SCHEMAS as LAUNCHERS
from foundry.config.schemas.root import to_config
from foundry.config.schemas.sweeper import SCHEMAS as SWEEPERS
from foundry.core.errors import ConfigError

PAGE, NAMES_PAGE = ROOT / "docs" / "configuration.md", ROOT / "docs" / "names.md"


@functools.cache
def composed(*overrides):
    return compose(*overrides, "hparams.per_gpu_batch_size=1")


@pytest.mark.long
def test_configuration_tables_are_up_to_date():
    script = load_script("generate_configuration")
    for page, with_tables in ((PAGE, script.page_with_tables), (NAMES_PAGE, script.names_page_with_tables)):
        text = page.read_text()
        assert with_tables(text) == text, "run python docs/generate_configuration.py"


def keys_below(path, schema):
    """Yield the keys of a schema, including keys of nested dataclasses."""
    hints = get_type_hints(schema)
    for item in fields(schema):
        key, hint = f"{path}.{item.name}", hints[item.name]
        yield from keys_below(key, hint) if is_dataclass(hint) else [key]


def test_configuration_tables_list_every_schema_field():
    text, options = PAGE.read_text(), Path(config_dir()).rglob("*.yaml")
    chosen = {pair for path in options for pair in re.findall(r"/schema/(\w+)/(\w+)@", path.read_text())}
    places = {"launcher": "hydra.launcher", "sweep": "hydra.sweeper"}
    of_hydra = {"launcher": LAUNCHERS, "sweep": SWEEPERS}
    schemas = {group: {schema.__name__: schema for schema in of_hydra[group]} for group in of_hydra}
    schemas |= {group: group_schemas(group) for group, _ in chosen if group not in of_hydra}
    keys = {key for group, name in chosen for key in keys_below(places.get(group, group), schemas[group][name])}
    assert {"hparams.batch_ramp.start", "optimizer.groups.head.lr_mult"} <= keys
    assert {key for key in keys if not key.rpartition(".")[2].startswith("_") and f"| `{key}` |" not in text} == set()


OPTIONS = {
    "defaults: [plain]  # alias": "another name of `plain`",
    "defaults: [plain, _self_]": "another name of `plain`",
    "# Faster.\ndefaults: [plain]\nlr: 2": "Faster. Begins with `plain`. Sets `hparams.lr=2`.",
    "# Faster.\ndefaults: [plain, other]\nlr: 2": "Faster. Begins with `plain` and `other`. Sets `hparams.lr=2`.",
    "# Other.\ndefaults: [plain, override /data: text]": "Other. Begins with `plain`. Chooses `data=text`.",
    "# Whole.\ndefaults: [/schema/hparams/HParams@_here_]": "Whole.",
    "# Both.\ndefaults: [/schema/hparams/HParams@_here_, plain]": "Both. Begins with `plain`.",
}


@pytest.mark.parametrize(("text", "line"), OPTIONS.items())
def test_option_without_changes_is_listed_as_an_alias(text, line, tmp_path, monkeypatch):
    script = load_script("generate_configuration")
    monkeypatch.setattr(script, "config_dir", lambda: str(tmp_path))
    (tmp_path / "hparams").mkdir()
    (tmp_path / "hparams" / "new.yaml").write_text(text)
    (option,) = script._options("hparams").values()
    assert script._option_line("hparams", "new", option) == f"- `hparams=new`: {line}"


def test_listed_aliases_compose_to_equal_configs():
    aliases = re.findall(r"^- `(\w+)=(\w+)`: another name of `(\w+)`$", PAGE.read_text(), re.MULTILINE)
    assert ("precision", "amp_bf16", "amp_bfloat16") in aliases
    for group, name, other in aliases:
        assert composed(f"{group}={name}") == composed(f"{group}={other}")


def test_configuration_tables_describe_types_in_words():
    generated = load_script("generate_configuration").tables()
    assert "<class" not in generated
    assert '| `scheduler.horizon` | duration | `"1.0"` |' in generated
    assert "| `hparams.batch_ramp.over_samples` | count or null |" in generated
    assert "| `hparams.batch_schedule` | batch sizes or null |" in generated
    assert "| `model.init_std` | number or rule | `0.02` |" in generated


def errors():
    """Yield (page, overrides, message) for each failing `$ python -m foundry` example in the documentation."""
    for page in (PAGE, NAMES_PAGE, ROOT / "README.md"):
        for block in re.findall(
            r"^```text\n(\$ python -m foundry .*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            for entry in block.split("$ python -m foundry ")[1:]:
                overrides, _, message = entry.partition("\n")
                yield page.name, overrides, message.strip()


@pytest.mark.parametrize(
    ("page", "overrides", "message"), [pytest.param(*row, id=" ".join(row[:2])) for row in errors()]
)
def test_documented_config_errors_are_current(page, overrides, message):
    words = shlex.split(overrides)
    with pytest.raises(ConfigError) as caught:
        check_flags(words) if words[0].startswith("-") else compose(*words)
    assert str(caught.value) == message


def test_names_page_lists_every_row_of_names_csv():
    text = NAMES_PAGE.read_text()
    assert {row.key for row in names() if f"`{row.key}`" not in text and f"`{row.key}=" not in text} == set()


def test_configuration_table_shows_names_of_other_systems():
    text = PAGE.read_text()
    (line,) = re.findall(r"^\| `hparams\.per_gpu_batch_size` .*$", text, re.MULTILINE)
    assert {"micro_batch_size", "per_device_train_batch_size", "MBS"} <= set(re.findall(r"`(\w+)`", line.split("|")[5]))


def test_plan_json_has_the_keys_that_the_names_table_mentions(plan):
    computed = {name for row in names() for name in re.findall(r"plan\.json has (\w+)", row.note)}
    assert {"accum_freq", "world_size", "lr_decay_steps"} <= computed
    assert computed - plan.keys() == set()


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """The content of plan.json of a tiny run."""
    from foundry.engine.train import train
    from foundry.run_dir.names import PLAN

    folder = tmp_path_factory.mktemp("plan")
    overrides = [
        "hparams=diffusion",
        "scheduler=wsd",
        "tracking=none",
        "tracking.progress=false",
        "hparams.max_steps=1",
    ]
    small = ["model.hidden_size=16", "model.num_layers=1", "model.num_heads=1", "evaluation.write_samples=false"]
    batch = ["hparams.global_batch_size=4", "evaluation.max_samples=8", "checkpoint.save_final=false"]
    train(to_config(composed(*overrides, *small, *batch)), folder)
    return json.loads((folder / PLAN).read_text())


def test_blocks_marked_elsewhere_are_skipped():
    text = "# Title\n\n```bash\nfirst\n```\n\n<!-- run: elsewhere -->\n```bash\nsecond\n```\n\n```text\nthird\n```\n"
    assert load_script("run_blocks").blocks(text) == ["first\n"]
