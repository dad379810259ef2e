"""names.csv: the error for a name of another system suggests an override, and that override composes."""

import ast
import csv
import functools
import json
import shlex
import zlib
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from PIL import Image
from support.composition import compose, configure
from support.lerobot_parts import write_by_hand
from support.scripts import ROOT
from support.tiny import SMALL_LM

from foundry.config.composition.store import GROUPS
from foundry.config.diagnostics.names import leaves, meanings
from foundry.config.diagnostics.other_frameworks import names, own_options, plain
from foundry.config.record.frozen import save_config
from foundry.core.errors import ConfigError

ROLLOUT = ["data=arithmetic", "data.form=prompts", "environment=arithmetic", "evaluation=reward"]
PREFERENCES = ["data=arithmetic", "data.form=preferences", "data.seq_len=96", "objective=dpo"]
DECAY = ["scheduler.weight_decay_incr_style=linear"]
STUDENT = [*SMALL_LM, "data.vocab_size=300", "objective=distillation", "objective.teacher={teacher}"]
STUDENT += ["evaluation.write_samples=false"]
POLICY = [*ROLLOUT, "objective=grpo", "objective.num_generations_per_prompt=8", "data.seq_len=96"]
POLICY += ["objective.max_new_tokens=48"]
CONTEXTS = {
    "objective=grpo": POLICY,
    "environment": POLICY,
    "objective=dpo": PREFERENCES,
    "objective.outside_top_k": [*STUDENT, "objective.top_k=8"],
    "objective=sft": ["data=arithmetic", "data.seq_len=96", "objective=sft"],
    "objective=distillation": STUDENT,
    "objective.z_loss_coefficient": ["objective=sft"],
    "model=base": ["data.seq_len=32"],
    "data=lerobot": ["hparams=policy", "evaluation=default"],
    "data=images": ["hparams=diffusion", "data=images", "data.path={images}"],
    "data=chats": ["data=chats", "data.path={chats}", "objective=sft"],
    "data=text": ["data=text", "data.path={text}"],
    "data=scenes": ["simulator=touch", "simulator.image_size=48", "data=scenes", "model=vlm", "objective=sft"],
    "hparams=policy simulator=gymnasium": [
        "simulator.state_dim=3",
        "simulator.action_dim=1",
        "data=lerobot",
        "data.path={lerobot}",
        "evaluation=default",
    ],
    "data.instruction_tokens": ["hparams=policy", "simulator=touch", "simulator.image_size=48", "model=vla"],
    "objective.num_train_timesteps": ["hparams=policy"],
    "hparams=policy": ["hparams=policy"],
    "evaluation=success": ["hparams=policy"],
    "objective=next_token": [],
    "distributed.tensor_parallel": [],
    "scheduler=wsd": ["scheduler=wsd"],
    "tracking=wandb": ["tracking=wandb"],
    "peft=lora": ["peft=lora", "optimizer=adamw"],
    "distributed=ddp distributed.shard_optimizer=true": ["distributed=ddp", "distributed.shard_optimizer=true"],
    "distributed=ddp": ["distributed=ddp"],
    "distributed=fsdp": ["distributed=fsdp"],
    "scheduler.start_weight_decay": [*DECAY, "scheduler.end_weight_decay=0.2"],
    "scheduler.end_weight_decay": [*DECAY, "scheduler.start_weight_decay=0.1"],
    "scheduler.weight_decay_incr_style": ["scheduler.start_weight_decay=0.1", "scheduler.end_weight_decay=0.2"],
    "hparams.max_steps=null": ["hparams.epochs=1"],
    "data.weights": ["data=text", "data.path=[{text},{text}]"],
    "data.encoding_errors": ["data=text", "data.path={text}"],
}
"""Additional overrides that a row needs to compose, by the choices and settings of the row."""

VALUES = {
    "model=base model.path": "{base}",
    "data=lerobot data.path": "{lerobot}",
    "data=images data.path": "{images}",
    "data=text data.path": "{text}",
    "data.validation_path": "{text}",
    "data.tokenizer": "{tokenizer}",
    "data.chat_template": "chatml",
    "+data.columns": "{prompt: question}",
    "data.weights": "[1,2]",
    "data.instruction_tokens": "24",
    "data.seq_len": "96",
    "checkpoint.resume": "auto",
    "checkpoint.interval": "100",
    "hparams.batch_ramp": "4 4 100",
    "hparams.batch_schedule": "0:4 1k:8",
    "hparams.train_samples": "500",
    "hparams.epochs": "1",
    "hparams.ema_decay": "0.99",
    "hparams.grad_checkpointing_policy": "selective",
    "optimizer.beta1={0}": "[0.9,0.95]",
    "scheduler.decay=": "0.2",
    "scheduler.decay_style": "cosine",
    "scheduler.warmup=": "10",
    "scheduler.horizon=": "500",
    "scheduler.min_lr": "1e-5",
    "scheduler.start_weight_decay": "0.1",
    "scheduler.end_weight_decay": "0.2",
    "scheduler.weight_decay_incr_style": "linear",
    "evaluation.early_stopping.patience": "3",
    "evaluation.interval": "50",
    "evaluation.max_samples": "64",
    "hydra.run.dir": "runs/x",
    "tracking.run_name": "x",
    "tracking.note": "x",
    "tracking.trackers.wandb.mode": "offline",
    "tracking.trackers.wandb.entity": "x",
    "model.embedding_init_std": "0.02",
    "model.logit_softcap": "30",
    "distributed.start_timeout_seconds": "100",
    "objective.ce_ratio": "0.5",
    "objective.teacher": "{teacher}",
    "objective.ratio_clip_c": "3",
    "objective.top_k": "8",
    "objective.hidden_dropout": "0.1",
    "objective.attention_dropout": "0.1",
    "peft.adapter_dropout": "0.1",
    "peft.target_modules": "[q_proj]",
    "simulator.id": "Pendulum-v1",
    "precision=": "fp32",
    "optimizer=": "adamw",
    "scheduler=": "linear",
    "device=": "cpu",
    "distributed=": "ddp",
    "environment=": "arithmetic",
}
"""Example values, by prefix of the override of a row; other rows use the default of the setting."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Files and folders that composition reads, by their placeholders in CONTEXTS and VALUES."""
    root = tmp_path_factory.mktemp("named")
    (root / "text.txt").write_text("a\n")
    (root / "chats.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b", "question": "c"}) + "\n")
    (root / "images" / "a").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(root / "images" / "a" / "1.png")
    (root / "lerobot").mkdir()
    write_by_hand(root / "lerobot")
    (root / "teacher").mkdir()
    (root / "teacher" / "config.json").write_text("{}")
    step = root / "base" / "checkpoints" / "step_00000010"
    step.mkdir(parents=True)
    (step / "manifest.json").touch()
    (step.parent / "latest").symlink_to(step.name)
    (root / "base" / "tokenizer.json").write_text("{}")
    save_config(configure(*SMALL_LM, "data.vocab_size=300"), root / "base")
    files = {"text": "text.txt", "chats": "chats.jsonl", "tokenizer": "base/tokenizer.json"}
    return {name: str(root / files.get(name, name)) for name in (*files, "images", "lerobot", "teacher", "base")}


def filled(text, folders):
    for name, path in folders.items():
        text = text.replace(f"{{{name}}}", path)
    return text


@functools.cache
def composed(*overrides):
    """Compose overrides; return the default config if the overrides alone are invalid."""
    try:
        return compose(*overrides)
    except ConfigError:
        return compose()


def context_name(row):
    """Return the first key of CONTEXTS that matches an override of the row, or None."""
    words = [" ".join(row.choices), *row.choices, row.ours, *row.overrides]
    return next((key for key in CONTEXTS if any(f"{word} ".startswith((f"{key}=", f"{key} ")) for word in words)), None)


def context(row, folders):
    """Return the overrides that a row needs in addition to its own."""
    return tuple(filled(override, folders) for override in CONTEXTS.get(context_name(row), ()))


def typed_value(row, folders):
    """Return the value that a user would type for the key of a row."""
    if row.value:
        return row.value
    override = next((override for override in row.overrides if "{" in override), "")
    for beginning, value in VALUES.items():
        if override.startswith(beginning) or (" " in beginning and row.ours.startswith(beginning)):
            return filled(value, folders)
    key = override.partition("=")[0]
    default = OmegaConf.select(composed(*context(row, folders)), key) if key else "x"
    return getattr(default, "name", str(default).lower() if isinstance(default, bool) else str(default))


ROWS = list(names())


def split_rows():
    """Return two lists: a tenth of the rows plus one row of each system and context, and the remaining rows."""
    tenth, others, represented = [], [], set()
    for row in ROWS:
        classes = {row.system, context_name(row)} if row.ours else set()
        in_tenth = classes - represented or zlib.crc32(f"{row.system} {row.key}={row.value}".encode()) % 10 == 0
        (tenth if in_tenth else others).append(row)
        represented |= classes
    return tenth, others


TENTH, OTHERS = split_rows()


def test_names_table_covers_all_systems():
    keys = {}
    for row in ROWS:
        keys.setdefault(row.system, set()).add(row.key)
    least = {"VLA Foundry": 30, "Megatron Bridge": 26, "ml-engineering": 6, "NeMo Customizer": 49}
    least |= {"TrainingArguments": 120, "peft LoraConfig": 20, "lerobot-train": 40}
    assert {system: len(keys[system]) for system in least if len(keys[system]) < least[system]} == {}
    assert sum(len(those) for system, those in keys.items() if system.startswith("TRL")) >= 60
    assert all(row.version for row in ROWS if row.system not in ("others", "Megatron-LM"))


def test_each_names_row_has_an_override_or_a_reason():
    assert [row for row in ROWS if not (row.ours or row.note)] == []
    assert len({(row.system, row.version, row.key, row.value) for row in ROWS}) == len(ROWS)
    with (ROOT / "foundry" / "config" / "diagnostics" / "names.csv").open(encoding="utf-8", newline="") as file:
        assert {len(line) for line in csv.reader(file)} == {6}


def test_overrides_of_the_names_table_refer_to_existing_keys():
    wrong = []
    for override in {override for row in ROWS for override in (*row.overrides, *row.choices)}:
        key, _, value = override.removeprefix("+").partition("=")
        in_mapping = key.startswith(("hydra.", "evaluation.evaluators.", "tracking.trackers."))
        if key not in meanings() and not in_mapping:
            known = key in GROUPS or key == "experiment"
            if not known or ("{" not in value and value not in own_options(key)):
                wrong.append(override)
    assert wrong == []


def fields_of(source, name):
    """Parse the field names of a class from the source of an installed package."""
    tree = ast.parse(source.read_text())
    (found,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
    return {node.target.id for node in found.body if isinstance(node, ast.AnnAssign) and node.target.id[0] != "_"}


@pytest.mark.parametrize(
    ("package", "module", "name"),
    [("transformers", "training_args", "TrainingArguments"), ("peft", "tuners.lora.config", "LoraConfig")],
)
def test_names_table_covers_the_fields_of_installed_versions(package, module, name):
    rows = [row for row in ROWS if row.system.endswith(name)]
    if not any(row.version.endswith(version(package)) for row in rows):
        pytest.skip(f"another version of {package} was read than is installed")
    source = Path(find_spec(package).origin).parent / Path(*module.split(".")).with_suffix(".py")
    assert fields_of(source, name) - {row.key for row in rows} == set()


def are_nested(key, other):
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")


def batches(lines):
    """Group (row, line) pairs into batches without equal or nested keys."""
    found = []
    for row, line in lines:
        key = line.partition("=")[0]
        place = next((batch for batch in found if not any(are_nested(key, other) for other in batch)), None)
        if place is None:
            found.append(place := {})
        place[key] = (row, line)
    return [list(batch.values()) for batch in found]


def is_accepted(key, value, config):
    """Return whether foundry has the key, or, if it is a group, the option `value`; x matches any option."""
    key = key.lstrip("+")
    if key in GROUPS:
        return value in own_options(key) or value == "x"
    return key in meanings() or OmegaConf.select(config, key) is not None


@pytest.mark.parametrize(
    ("place", "rows"),
    [
        pytest.param("", TENTH, id="a tenth"),
        pytest.param("", OTHERS, id="others", marks=pytest.mark.long),
        *(
            pytest.param(place, ROWS, id=place, marks=pytest.mark.long)
            for place in ("hparams.", "guard.", "+", "upper")
        ),
    ],
)
def test_error_for_a_foreign_name_suggests_its_override(place, rows, folders):
    default = composed()
    known, lines = leaves(default), []
    for row in rows:
        value = typed_value(row, folders)
        key = row.key.upper() if place == "upper" else f"{place}{row.key}"
        if not is_accepted(key, value, default):
            lines.append((row, f"{key}={value}" if " " not in value else f"{key}='{value}'"))
    parser, wrong = OverridesParser.create(), []
    for batch in batches(lines)[: None if place == "" else 1]:
        with pytest.raises(ConfigError) as refused:
            compose(*[line for _, line in batch])
        answers = {}
        for violation in refused.value.violations:
            answers.setdefault(violation.key, violation.message)
        for row, line in batch:
            (override,) = parser.parse_overrides([line])
            answer = answers.get(override.key_or_group, "nothing")
            # An added key (+) is rejected after composition, which has parsed its value.
            given = override.value() if place == "+" else override.get_value_string()
            expected = alternatives(row, written(given), known)
            if not any(text in answer for text in expected):
                wrong.append(f"{line}: {answer}; not any of {expected}")
    assert wrong == []


@pytest.mark.long
def test_errors_for_foreign_names_in_a_file_suggest_their_overrides(folders, run_command):
    known = leaves(composed())
    rows = {row.key: row for row in reversed(ROWS) if "." not in row.key}
    values = {
        key: OmegaConf.to_container(OmegaConf.create(f"v: {typed_value(row, folders)}"))["v"]
        for key, row in rows.items()
    }
    text = yaml.safe_dump({"defaults": ["config", "_self_"], "guard": values}, sort_keys=False)
    (run_command.cwd / "named.yaml").write_text(text)
    _, stderr = run_command("--config-dir", ".", "--config-name", "named", code=2)
    answers = dict(line.removeprefix("named.yaml: guard.").split(": ", 1) for line in stderr.splitlines())
    assert answers.keys() == rows.keys()
    wrong = []
    for key, row in rows.items():
        expected = alternatives(row, written(values[key]), known)
        if not isinstance(values[key], (list, dict)) and not any(text in answers[key] for text in expected):
            wrong.append(f"{key}={values[key]}: {answers[key]}; not any of {expected}")
    assert wrong == []


def written(value):
    """Format a value in override syntax; strings are unchanged."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def alternatives(row, value, known):
    """Return acceptable suggestions: the error for a row must contain one of them."""
    text = row.write(value, known, own_options)
    own = [text] if text else [row.note[:60]] if row.note else []
    if same := [other for other in ROWS if plain(other.key) == plain(row.key) and other.system != row.system]:
        own += [other.write(value, known, own_options) or "" for other in same if other.value in ("", row.value)]
    listed = [
        f"choose {key}= from {', '.join(own_options(key))}" for key in row.settings if text is None and key in GROUPS
    ]
    return [text for text in own + listed if text]


def settings_alone(row):
    return bool(row.overrides) and all("." in key for key in row.settings)


@pytest.mark.parametrize(
    "rows", [pytest.param(TENTH, id="a tenth"), pytest.param(OTHERS, id="others", marks=pytest.mark.long)]
)
def test_suggested_overrides_of_the_names_table_compose(rows, folders):
    together, alone, wrong = {}, {}, []
    for row in rows:
        beside = context(row, folders)
        if not row.ours or any(word in row.ours for word in NEEDED if find_spec(NEEDED[word]) is None):
            continue
        config = composed(*beside)
        text = row.write(typed_value(row, folders), leaves(config), own_options)
        assert text is not None, row
        words = tuple(shlex.split(text))
        if settings_alone(row):
            together.setdefault((beside, "settings"), {}).setdefault(words, row)
        elif {word.partition("=")[0] for word in words} <= INDEPENDENT:
            together.setdefault((beside, "choices"), {}).setdefault(words, row)
        else:
            alone.setdefault((beside, words), row)
    for (beside, _), row_of in together.items():
        for batch in disjoint(row_of):
            try:
                compose_beside(beside, [word for words in batch for word in words])
            except ConfigError:
                alone |= {(beside, words): row_of[words] for words in batch}
    for (beside, words), row in alone.items():
        try:
            compose_beside(beside, words)
        except ConfigError as error:
            wrong.append(f"{row.system} {row.key}={row.value}: {' '.join(words)}: {error}")
    assert wrong == []


def compose_beside(beside, words):
    """Compose `words` with the overrides of `beside` that set other keys."""
    keys = {word.partition("=")[0] for word in words}
    compose(*[word for word in beside if word.partition("=")[0] not in keys], *words)


INDEPENDENT = {"checkpoint", "device", "distributed", "guard", "optimizer", "precision", "scheduler", "tracking"}
"""Groups whose options compose in any combination."""

NEEDED = {"metaworld": "metaworld", "wandb": "wandb", "tensorboard": "tensorboard", "gymnasium": "gymnasium"}
"""Optional packages, by a word of the overrides that need them."""


def disjoint(rows):
    """Group the rows' overrides so that no two rows of a group set the same key."""
    found = []
    for words in rows:
        keys = {word.partition("=")[0] for word in words}
        place = next((batch for batch in found if not keys & batch[0]), None)
        if place is None:
            found.append(place := (set(), []))
        place[0].update(keys)
        place[1].append(words)
    return [batch for _, batch in found]
