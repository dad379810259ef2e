"""Unusual values for every setting of every option give a one-line error or a valid run.

`FOUNDRY_ALL_VALUES=1 pytest -n 0 -s -m "long or not long" tests/config/test_hostile_values.py` tries every value on
every setting. Without the variable, the test tries a fixed share of these pairs.
"""

import json
import math
import os
import pickle
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from support.examples import selection, some_of

import foundry.optim.schedules  # noqa: F401 # its import of torch does not count as composition time
from foundry.config.build import build
from foundry.config.checks.check import check
from foundry.config.composition.compose import config_dir, install
from foundry.config.composition.hydra_versions import VERSION_BASE
from foundry.config.composition.store import GROUPS
from foundry.config.diagnostics import override_errors as errors
from foundry.config.lengths import check_lengths, resolve_budget
from foundry.config.record.frozen import hash_config
from foundry.config.schemas.launcher import SCHEMAS as LAUNCHERS
from foundry.config.schemas.root import to_config
from foundry.config.schemas.scheduler import Scheduler
from foundry.config.schemas.sweeper import SCHEMAS as SWEEPERS
from foundry.config.setting import check_fields
from foundry.core.errors import ConfigError
from foundry.tasks.robots.data.lerobot_writing import Episode, write_lerobot

SHARE = 1 if os.environ.get("FOUNDRY_ALL_VALUES") else 30 if selection.is_all else 450

NUMBERS = ["0", "-1", "-0", "-0.0", "1e309", "1e308", "-1e308", "1e-320", "nan", "inf", "-inf", "1.5", "1e18", "1e15"]
INTEGERS = [
    str(2**31),
    str(2**63 - 1),
    str(2**63),
    str(2**64),
    "9" * 400,
    "9" * 5000,
    str(10**12),
    str(10**15),
    "1_000",
]
TEXTS = ["", "''", "' '", "x" * 10_000, "'\x1b[31mred'", "'a\nb'", "'\0'", "'\u202e'", "'\udc80'", "../..", "/dev/zero"]
TEXTS += [
    "ünïcode",
    "'ünïcode'",
    "'/**/nowhere'",
    "'['",
    "'**a'",
    "true",
    "yes",
    "'???'",
    "???",
    "1e99 tokens",
    "1e-99",
]
TEXTS += [
    "'1e-99 run'",
    "'99999999999999T'",
    "'0:1 1:1'",
    "'0:1'",
    "'1 epochs'",
    "'0.0000001 run'",
    "'1e-320'",
    "'$(ls)'",
]
NESTED = [
    "null",
    "[]",
    "{}",
    "[1,2]",
    "[[[[1]]]]",
    "{a: 1}",
    "{a: {b: {c: [null]}}}",
    "{_target_: os.getcwd}",
    "[null]",
]
NESTED += ["[" * 30 + "]" * 30]
INTERPOLATIONS = ["${a.b}", "${hparams.lr}", "${oc.env:FOUNDRY_NOWHERE}", "${oc.decode:'[1'}", "${nope:1}", "${..lr}"]
INTERPOLATIONS += ["${hydra:runtime.cwd}", "${hparams}", "${", "$", "${oc.create:{a:1}}", "${model}", "'${a'"]
SWEEPS = [
    "1,2",
    "range(0,1,0)",
    "range(1,10)",
    "glob(*)",
    "choice(a,b)",
    "interval(0,1)",
    "sort(3,2)",
    "int(x)",
    "float(1e400)",
]
VALUES = [*NUMBERS, *INTEGERS, *TEXTS, *NESTED, *INTERPOLATIONS, *SWEEPS]

ODD = ("Traceback", "object at 0x", "<class", "<enum", "full_key", "ConfigValueError", "NoneType")

REWARDED = ["objective=grpo", "environment=arithmetic", "evaluation=reward", "data.seq_len=512"]
REWARDED += [
    "objective.num_prompts_per_step=1",
    "objective.num_generations_per_prompt=8",
    "hparams.global_batch_size=8",
    "hparams.per_gpu_batch_size=8",
]
ANSWERED = "+evaluation.evaluators.exact_match._target_=foundry.evals.ExactMatch"
SUMS = [*REWARDED, "data=arithmetic", "data.form=prompts"]
NEEDED = {
    "data=text": ["data.path=setup.cfg"],
    "data=chats": ["objective=sft", "data.path=setup.cfg"],
    "data=preferences": ["objective=dpo", "data.path=setup.cfg"],
    "data=prompts": [*REWARDED, "data.path=setup.cfg"],
    **{f"environment={name}": [ANSWERED] for name in ("arithmetic", "exact_match", "multiple_choice", "python")},
    "environment=format": [ANSWERED, "environment.pattern=x"],
    "evaluation=reward": SUMS,
    "objective=grpo": SUMS,
    "objective=distillation": ["objective.teacher=BASE"],
    "objective=sft": ["data=arithmetic"],
    "objective=dpo": ["data=arithmetic", "data.form=preferences"],
    "hydra/launcher=kubernetes": ["hydra.launcher.image=registry/foundry:1"],
    "hparams=nemo_sft": ["model=transformer", "data.path=setup.cfg"],
    "hparams=sft": ["data=arithmetic"],
    "hparams=dpo": ["data=arithmetic", "data.form=preferences"],
    "hparams=grpo": SUMS,
    "hparams=distillation": ["objective.teacher=BASE"],
    "hparams=vlm": ["experiment=vlm_scenes"],
    "hparams=vla": ["experiment=vla_touch"],
    "hparams=vla_foundry": ["hparams.max_steps=2000"],
    "hparams=megatron": ["hparams.max_steps=100"],
    "model=base": ["model.path=BASE"],
    "peft=lora": ["optimizer=adamw"],
    "model=hf": ["+model.config={hidden_size: 32}"],
    "distributed=hsdp": ["distributed.num_replicas=1"],
    "scheduler=constant": ["scheduler.min_lr=0"],
    **{f"{group}={name}": ["hparams=diffusion"] for group, name in (("model", "dit"), ("data", "digits"))},
    "data=tokens": ["data.path=setup.cfg"],
    "data=images": ["hparams=diffusion", "data.path=BASE"],
    "objective=diffusion": ["hparams=diffusion"],
    **{word: ["hparams=policy"] for word in ("data=demonstrations", "model=policy_dit", "evaluation=success")},
    **{f"objective={name}": ["hparams=policy"] for name in ("diffusion_policy", "flow_policy", "action_regression")},
    **{f"simulator={name}": ["hparams=policy"] for name in ("around", "push", "touch")},
    **{f"simulator={name}": ["hparams=policy"] for name in ("fetch_push", "fetch_pick_and_place")},
    "data=lerobot": ["data.path=EPISODES"],
    "simulator=gymnasium": ["hparams=policy", "simulator.id=X", "simulator.state_dim=3", "simulator.action_dim=1"],
    "simulator=metaworld": ["hparams=policy"],
    **{word: ["experiment=vlm_scenes"] for word in ("data=scenes", "model=vlm")},
    "model=vla": ["experiment=vla_touch"],
    "data=image_chats": ["objective=sft", "model=vlm", "data.path=setup.cfg"],
    "hydra/launcher=slurm": ["hydra.mode=MULTIRUN"],
    "hydra/launcher=local": ["hydra.mode=MULTIRUN"],
}


def options():
    """Yield an override for each option of each group."""
    for group in GROUPS:
        for path in sorted((Path(config_dir()) / group).glob("*.yaml")):
            if "/schema/" in path.read_text():
                yield f"{group}={path.stem}"
    yield from (f"hydra/launcher={schema.__name__.lower()}" for schema in LAUNCHERS)
    yield from ("hydra/sweeper=foundry", "hydra/sweeper=optuna")


OPTIONS = list(options())


def keys_of(config, path):
    """Yield the dotted path of a group and of all values and mappings below it."""
    yield path
    node = OmegaConf.select(config, path)
    for key in node:
        child = f"{path}.{key}"
        yield from keys_of(config, child) if OmegaConf.is_dict(node._get_node(key)) else [child]


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    """A transformers folder with the one file that composition reads."""
    folder = tmp_path_factory.mktemp("base")
    sizes = {"model_type": "llama", "vocab_size": 4096, "max_position_embeddings": 256}
    (folder / "config.json").write_text(json.dumps(sizes))
    return folder


@pytest.fixture(scope="module")
def episodes_folder(tmp_path_factory):
    """A LeRobot dataset of two episodes."""
    folder = tmp_path_factory.mktemp("episodes")
    episode = Episode(state=np.zeros((4, 3), np.float32), actions=np.zeros((4, 2), np.float32), task="wait")
    write_lerobot(folder, [episode, episode], fps=10, robot_type="none")
    return folder


@pytest.fixture(scope="module")
def repository():
    install()
    with initialize_config_dir(config_dir(), **VERSION_BASE):
        return CachingConfigRepository(GlobalHydra.instance().config_loader().repository)


def settled(repository, base, key, text):
    """Set a value in a composed config, 20 times faster than composition; return the config and the violations."""
    parsed, violations = errors._parse([f"{key}={text}"])
    config = pickle.loads(base)
    for override in parsed:
        if errors._is_choice(repository, override):
            return None, violations  # the choice of an option: covered by other tests
        violations += errors._apply(repository, config, override, sweeping=False)
    if not violations:
        violations += check(config) or sweeper_violations(config)
    return config, violations


def sweeper_violations(config):
    sweeper = config.hydra.sweeper
    if OmegaConf.get_type(sweeper) not in SWEEPERS:
        return []
    options = OmegaConf.to_object(sweeper)
    return list(check_fields(options, "hydra.sweeper")) or list(options.check())


def badly_said(violations):
    """Yield a problem for each error line that is too long, has no key or shows Python internals."""
    for line in map(str, violations):
        if len(line) > 400 or not line.isprintable() or line.startswith(":"):
            yield f"is not a line: {line!r}"
        yield from (f"says {odd}: {line}" for odd in ODD if odd in line)


def nonsense(config):
    """Yield the problems of an accepted config: bad error lines about lengths, or impossible rates of its schedule."""
    own = to_config(config)
    hash_config(own)
    hparams, tokens = own.hparams, getattr(own.data, "seq_len", None)
    try:
        budget = resolve_budget(hparams, samples_per_epoch=10**6, dp_size=1, tokens_per_sample=tokens)
        violations = list(check_lengths(own, budget))
    except ConfigError as error:
        violations = list(error.violations)
    yield from badly_said(violations)
    if not violations and isinstance(own.scheduler, Scheduler) and own.scheduler._target_.startswith("foundry."):
        yield from wrong_rates(own, budget)


def wrong_rates(config, budget):
    schedule = build(config.scheduler, max_lr=config.hparams.lr, budget=budget)
    for samples in (0, 1, budget.total_samples // 2, budget.total_samples - 1):
        lr = schedule.lr(samples, samples + 1)
        if not 0 <= lr <= config.hparams.lr * (1 + 1e-9):
            yield f"has the rate {lr} after {samples} samples"
        if not math.isfinite(schedule.weight_decay(samples, samples + 1) or 0.0):
            yield f"has no weight decay after {samples} samples"


def problems(repository, base, key, text):
    """Yield the problems of one value: bad error lines, an invalid accepted config, or an exception."""
    try:
        config, violations = settled(repository, base, key, text)
        yield from badly_said(violations)
        if not violations and config is not None:
            yield from nonsense(config)
    except Exception as error:
        yield f"raises {type(error).__name__}: {str(error)[:300]}"


@pytest.mark.parametrize("option", some_of(OPTIONS, *OPTIONS[::6]))
def test_unusual_values_give_one_line_errors_or_valid_configs(
    option, repository, base_folder, episodes_folder, tmp_path, monkeypatch
):
    needed = [
        word.replace("BASE", str(base_folder)).replace("EPISODES", str(episodes_folder))
        for word in NEEDED.get(option, [])
    ]
    overrides = [option, *needed]
    try:
        with initialize_config_dir(config_dir(), **VERSION_BASE):
            composed = compose("config", overrides, return_hydra_config=True)
    except ConfigError as error:
        if all("is not installed" in violation.message for violation in error.violations):
            pytest.skip(str(error))  # the option needs an optional package
        raise
    base, group = pickle.dumps(composed), option.partition("=")[0].replace("/", ".")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.cfg").touch()
    tried, wrong = 0, []
    for key in keys_of(composed, group):
        for text in VALUES:
            if zlib.crc32(f"{option} {key}={text}".encode(errors="backslashreplace")) % SHARE == 0:
                tried += 1
                wrong += [f"{key}={text[:80]} {problem}" for problem in problems(repository, base, key, text)]
    sys.stdout.write(f"\n{option}: {tried} tried\n")
    assert wrong == []
    assert list(tmp_path.iterdir()) == [tmp_path / "setup.cfg"]
