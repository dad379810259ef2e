"""Usage: `python tests/evidence/table.py [--write]`. Compare the compositions of `table.json` with this tree.

For each composition `table.json` has its overrides and three records:

- config: the config hash, recorded in run directories and checkpoints;
- data: `identity()` of the data, recorded in checkpoints; it seeds the order of samples;
- plan: the content of plan.json that does not depend on the machine, as `portable` returns it.

Paths in the overrides lead to small files that `write_small_files` writes into the current folder. Compositions with
`config_only` record only the hash; its value is the reason. `--write` replaces the records with those from this tree.
Use it only after an intended change of the records, and review `git diff`. To add a composition, add its name and
its overrides. No record depends on the machine; digests of trained tokenizers depend on the package `tokenizers`.
"""

import json
import os
import sys
import tempfile
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import pytest
from support.composition import configure
from support.small_files import write_small_files

from foundry.config.composition.resolvers import world_size
from foundry.config.record.frozen import hash_config
from foundry.config.schemas.distributed import resolve_distributed
from foundry.config.schemas.root import Config
from foundry.data.splits import DataSplits
from foundry.parts.data import build_data
from foundry.parts.optimization import build_budget, build_schedule
from foundry.planning.derive import build_plan
from foundry.planning.fake import build_adapted, build_fake
from foundry.planning.fits import answer_tokens, row_tokens
from foundry.planning.memory import checkpoint_bytes, estimate_memory

TABLE = Path(__file__).with_name("table.json")
RECORDS = ("config", "data", "plan")
FOLDERS = ("demonstrations", "pictures", "scenes")
"""Notes of the data with absolute paths of cache folders."""
MEMORY = ("memory", "checkpoint_bytes")
ESTIMATED = ("activations_estimated", "moments", "note")
"""Parts of the memory that depend on the kernels of the installed torch."""

Entry = dict[str, Any]


def read_table() -> dict[str, Entry]:
    """Return the compositions by name."""
    table: dict[str, Entry] = json.loads(TABLE.read_text(encoding="utf-8"))
    return table


def write_table(table: dict[str, Entry]) -> None:
    """Write the compositions, one record a line."""
    lines = []
    for name, entry in table.items():
        records = ",\n".join(f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in entry.items())
        lines.append(f"  {json.dumps(name)}: {{\n{records}\n  }}")
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def compute(entry: Entry, *, with_memory: bool = True) -> Entry:
    """Return the records of a composition in this tree; the current folder must hold the files that it reads.

    Args:
        entry: a composition with its overrides.
        with_memory: whether the plan includes the memory of the run, which takes half of the time.
    """
    config = _with_relative_weights(configure(*entry["overrides"]))
    records: Entry = {"config": hash_config(config)}
    if "config_only" in entry:
        return records
    data = build_data(config)
    plan = describe_plan(config, data, with_memory=with_memory)
    return {**records, "data": data.identity(), "plan": rounded(portable(plan))}


def without_memory(entry: Entry) -> Entry:
    """Return a composition without the memory in its plan."""
    if "plan" not in entry:
        return entry
    return entry | {"plan": {key: value for key, value in entry["plan"].items() if key not in MEMORY}}


def _with_relative_weights(config: Config) -> Config:
    """Return the config with a relative `model.init_from`; composition of `model=base` makes it absolute."""
    weights = config.model.init_from
    if weights is None:
        return config
    return replace(config, model=replace(config.model, init_from=str(Path(weights).relative_to(Path.cwd()))))


def describe_plan(config: Config, data: DataSplits, *, with_memory: bool) -> dict[str, Any]:
    """Return the content of the plan.json of `foundry.plan`, with unknown memory of activations."""
    ranks = world_size(config.distributed.nproc_per_node)
    budget = build_budget(config, data, config.distributed.dp_size(ranks))
    schedule, fake = build_schedule(config, budget), build_fake(partial(build_adapted, config))
    strategy, packed = resolve_distributed(config.distributed, ranks).strategy, row_tokens(config)
    of_ranks = {"world_size": ranks, "strategy": strategy, "device": "cpu"}
    plan = build_plan(config, budget, data, schedule, fake.model, **of_ranks, pack_tokens=packed)
    if not with_memory:
        return plan
    memory = estimate_memory(
        config,
        fake,
        world_size=ranks,
        microbatch=None,
        device_type="cpu",
        tokenizer=data.tokenizer,
        answer_tokens=answer_tokens(config, data),
        pack_tokens=packed,
    )
    return {**plan, "memory": asdict(memory), "checkpoint_bytes": checkpoint_bytes(config, fake)}


def portable(plan: dict[str, Any]) -> dict[str, Any]:
    """Return the machine-independent content of a plan.json."""
    left_out = {"notes": FOLDERS, "memory": (*ESTIMATED, "total", "peak", "usable")}
    return {
        name: {key: one for key, one in value.items() if key not in left_out[name]} if name in left_out else value
        for name, value in plan.items()
        if name != "device"
    }


def rounded(node: Any) -> Any:
    """Round numbers to 12 digits: the last digits of cosines and sums differ between processors."""
    if isinstance(node, dict):
        return {key: rounded(value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return [rounded(value) for value in node]
    return float(f"{node:.12g}") if isinstance(node, float) else node


def differences(recorded: Entry, computed: Entry) -> list[str]:
    """Return a line for each record of a composition that differs, with the differing keys."""
    return [
        f"{name}: {', '.join(_changes(recorded.get(name), computed.get(name)))}"
        for name in RECORDS
        if recorded.get(name) != computed.get(name)
    ]


def _changes(before: Any, after: Any, key: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        return [line for name in names for line in _changes(before.get(name), after.get(name), f"{key}.{name}")]
    return [f"{key.removeprefix('.')} {before} -> {after}".strip()]


def main(*arguments: str) -> int:
    """Compute the records of all compositions and print the differences; with `--write`, write the table."""
    table, writes = read_table(), arguments == ("--write",)
    os.environ.pop("FOUNDRY_CACHE", None)  # the hash depends on it, and was recorded with the default
    differing = 0
    with tempfile.TemporaryDirectory(prefix="foundry-table-") as folder:
        os.chdir(folder)
        write_small_files(Path(folder))
        for name, entry in table.items():
            try:
                computed = compute(entry)
            except pytest.skip.Exception as skipped:
                sys.stdout.write(f"{name}: skipped, {skipped}\n")
                continue
            for line in differences(entry, computed):
                sys.stdout.write(f"{name}: {line}\n")
                differing += 1
            table[name] = {key: value for key, value in entry.items() if key not in RECORDS} | computed
        os.chdir(TABLE.parent)
    if writes:
        write_table(table)
    return int(bool(differing) and not writes)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
