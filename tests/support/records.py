"""Synthetic rehearsal records, for tests of derived values and tables."""

from foundry.rehearsal.record import Collective, Peak, RehearsalRecord

MIB = 2**20


def collective(**changes):
    """Return ten all-gathers of a step among eight ranks of a node; `changes` replace fields."""
    usual = {"phase": "step 2", "kind": "all_gather", "device": "cuda", "group_size": 8, "num_nodes": 1, "count": 10}
    return Collective(**{**usual, "bytes": 80 * MIB, **changes})


def record(**changes):
    """Return the record of a rehearsal of two steps on eight ranks; `changes` replace fields."""
    weights = {"weights": MIB}
    usual = {
        "world_size": 8,
        "ranks_per_node": 8,
        "device": "NVIDIA H100 80GB HBM3",
        "capacity_bytes": 80 * 2**30,
        "steps": 2,
        "last_step": 2,
        "result": {"status": "finished", "step": 2},
        "plan": None,
        "peaks": [
            Peak(phase="starting", bytes=MIB, parts={"held": MIB}),
            Peak(phase="step 2", bytes=5 * MIB, parts={**weights, "activations": 4 * MIB}),
            Peak(phase="step 2, optimizer", bytes=3 * MIB, parts={**weights, "optimizer": 2 * MIB}),
        ],
        "live": Peak(phase="step 2", bytes=3 * MIB, parts={**weights, "optimizer": 2 * MIB}),
        "host_waits": [],
        "collectives": [],
        "attention": [],
        "flops": {"step 2": 10**12},
        "largest": [],
        "notes": [],
    }
    return RehearsalRecord(**{**usual, **changes})
