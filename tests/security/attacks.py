"""Hostile `_target_` mappings, and the config keys where tests insert them."""

import json
from collections.abc import Iterator

CANARY = "FOUNDRY_TEST_CANARY"
SECRET = "hunter2-of-the-reader"


def targets(canary):
    """Return nodes by name that Hydra would instantiate as foreign code; most would create the canary file."""
    touch = f"touch {canary}"
    make = {"_target_": "pathlib.Path.touch", "_args_": [{"_target_": "pathlib.Path", "_args_": [str(canary)]}]}
    return {
        "collect_env": {"_target_": "torch.utils.collect_env.run", "command": touch},
        "os.system": {"_target_": "os.system", "command": touch},
        "posix.system": {"_target_": "posix.system", "command": touch},
        "subprocess": {"_target_": "subprocess.check_output", "args": touch, "shell": True},
        "eval": {"_target_": "builtins.eval", "_args_": [f"open({str(canary)!r}, 'w')"]},
        "sympify": {"_target_": "sympy.sympify", "a": f"open({str(canary)!r}, 'w')"},
        "torch.load": {"_target_": "torch.load", "f": str(canary), "weights_only": False},
        "numpy.load": {"_target_": "numpy.load", "file": str(canary), "allow_pickle": True},
        "joblib.load": {"_target_": "joblib.load", "filename": str(canary)},
        "torch.hub": {"_target_": "torch.hub.load", "repo_or_dir": str(canary.parent), "model": "m", "source": "local"},
        "open": {"_target_": "io.open", "file": str(canary), "mode": "w"},
        "touch": make,
        "partial": {"_target_": "functools.partial", "_args_": [make]},
        "own build": {"_target_": "foundry.config.build.build", "node": make},
        "own instantiate": {"_target_": "hydra.utils.instantiate", "config": make},
        "own write": {"_target_": "foundry.run_dir.files.write_atomically", "path": make, "text": "x"},
        "other group": {"_target_": "foundry.optim.optimizers.adamw", "model": make},
        "private": {"_target_": "foundry.models.transformer.Transformer.__init__", "self": make},
        "deferred": {"_partial_": True, "_target_": "os.system", "command": touch},
        "by list": [make],
        "arguments": {"_args_": [make]},
        "deep": {"a": {"b": [{"c": make}]}},
    }


def places(attack, name) -> Iterator[tuple[str, dict]]:
    """Yield (name, change) for changes of a language model's config that each insert one attack."""
    as_mapping = attack if isinstance(attack, dict) else {"list": attack}
    for group in ("model", "data", "objective", "optimizer", "scheduler", "simulator"):
        yield f"{name} as {group}", {group: ("replace", as_mapping)}
        yield f"{name} in {group}", {group: ("add", {"extra": attack})}
    for group in ("hparams", "tracking", "checkpoint", "evaluation", "precision", "distributed", "guard"):
        yield f"{name} as {group}", {group: ("replace", as_mapping)}
        yield f"{name} in {group}", {group: ("add", {"seed": attack})}
    yield f"{name} as a pattern", {"optimizer": ("deep", ("groups", "patterns"), {"p": attack})}
    yield f"{name} in hidden_size", {"model": ("add", {"hidden_size": attack})}


def spoilt(settings: dict, change: dict) -> dict:
    """Return a copy of the settings with a change from `places`."""
    settings, change = json.loads(json.dumps(settings)), json.loads(json.dumps(change))
    for group, (how, *what) in change.items():
        if how == "replace":
            settings[group] = what[0]
        elif how == "add":
            settings[group] = {**settings[group], **what[0]}
        else:
            node = settings[group]
            for key in what[0]:
                node = node[key]
            node.update(what[1])
    return settings


def hydra_targets(node) -> Iterator[str]:
    """Yield every `_target_` at any depth."""
    if isinstance(node, dict):
        if isinstance(node.get("_target_"), str):
            yield node["_target_"]
        for value in node.values():
            yield from hydra_targets(value)
    elif isinstance(node, list):
        for value in node:
            yield from hydra_targets(value)
