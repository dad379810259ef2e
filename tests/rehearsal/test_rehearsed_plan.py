"""`python -m foundry.plan plan.rehearse=true`: tables, section of plan.json, and errors."""

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
from support.records import MIB, collective, record
from support.tiny import TINY_LM

from foundry.planning.memory import Memory
from foundry.rehearsal import rehearsal
from foundry.rehearsal.exchange import RehearsalError
from foundry.rehearsal.record import Attention, HostWait, Peak
from foundry.rehearsal.report import RehearsalReport
from foundry.rehearsal.roofline import least_time
from foundry.training.trainer import CHECKING

RUN = [*TINY_LM, "optimizer=adamw", "distributed=fsdp", "precision=amp_bf16", "checkpoint=none"]
BATCH = ["hparams.per_gpu_batch_size=2", "hparams.global_batch_size=64"]
REHEARSAL = ["plan.rehearse=true", "plan.ranks=16", "hydra.run.dir=plan"]
FILES = {"foundry.log", "plan.json", "schedule.csv", "schedule.png"}


def values(stdout):
    """Return the values of printed table rows by row name; of rows with equal names, the last."""
    rows = [line.strip().split("  ", 1) for line in stdout.splitlines() if line.startswith("  ")]
    return {row[0]: row[1].strip() for row in rows if len(row) == 2}


def test_plan_with_rehearsal_prints_tables_and_writes_plan_json(run_command, rehearsed, monkeypatch):
    monkeypatch.setattr(rehearsal, "rehearse", rehearsed.rehearse)
    stdout, _ = run_command(*RUN, *BATCH, *REHEARSAL, "plan.device=a100", module="foundry.plan")
    plan = json.loads((run_command.cwd / "plan" / "plan.json").read_text())
    section, rows = plan["rehearsal"], values(stdout)
    assert plan["world_size"] == section["world_size"] == 16
    assert plan["device"] == section["device"] == "NVIDIA A100-SXM4-80GB"
    assert plan["accum_freq"] == 2
    assert section["planned_bytes"] == plan["memory"]["total"]
    assert section["above_plan"] == pytest.approx(section["peak"]["bytes"] / plan["memory"]["total"] - 1)
    assert rows["host waits"] == "none"
    assert rows["by formula"] == "the same"
    counted = {}
    for each in section["collectives"]:
        if each["phase"] == "step 2" and each["device"] == "cuda":
            counted[each["kind"]] = counted.get(each["kind"], 0) + each["count"]
    assert counted == section["expected_collectives"]
    assert rows["all_gather"].startswith(f"{counted['all_gather']} among 16 ranks on 2 nodes, ")
    least = section["least_time"]
    assert least["flops"] == section["flops"]["step 2"] > 0
    assert (least["peak_flops"], least["link_bandwidth"], least["network_bandwidth"]) == (312e12, 300e9, 25e9)
    assert rows["at least"].endswith(" tokens a second")
    assert {"build", "passes", "optimizer", "evaluate", "plan"} == set(rows["peak in MiB"].split())
    assert {path.name for path in (run_command.cwd / "plan").iterdir() if path.name[0] != "."} <= FILES
    assert [path.name for path in run_command.cwd.iterdir()] == ["plan"]


@pytest.mark.long
def test_plan_command_rehearses_in_a_child_process(shell, rehearsed):
    """The fixture `rehearsed` skips the test if this machine cannot rehearse."""
    shell.run(*RUN, *BATCH, *REHEARSAL, "plan.network_gb_per_second=1", module="foundry.plan")
    section = json.loads((shell.cwd / "plan" / "plan.json").read_text())["rehearsal"]
    assert section["world_size"] == 16
    assert section["least_time"]["network_bandwidth"] == 1e9
    assert section["least_time"]["limit"] == "network"
    assert "step 2" not in {wait["phase"] for wait in section["host_waits"]}


@pytest.mark.long
def test_sigterm_ends_the_rehearsal_process_and_deletes_its_folder(shell, rehearsed):
    process = shell.start(*RUN, *BATCH, *REHEARSAL, module="foundry.plan")
    deadline = time.monotonic() + 60
    while not (children := find_children(process.pid, "foundry.rehearsal.child")):
        assert process.poll() is None, process.outputs()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    [(child, words)] = children.items()
    folder = Path(words[-1]).parent
    assert folder.is_dir()
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 128 + signal.SIGTERM
    assert not folder.exists()
    while Path(f"/proc/{child}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def find_children(parent, word):
    """Return, by pid, the command lines of a process's children that have `word` as an argument."""
    pids = [pid for path in Path(f"/proc/{parent}/task").glob("*/children") for pid in path.read_text().split()]
    words = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1] for pid in pids}
    return {pid: line for pid, line in words.items() if word in line}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["plan.rehearse=true", "plan.device=h10"], "plan.device: is h10 but must be one of a100, h100, h200, b200, "),
        (["plan.device=h10"], "; did you mean h100?\n"),
        (
            ["plan.rehearse=true", "plan.ranks=12"],
            "hparams.global_batch_size: is 64 but must be a multiple of per_gpu_batch_size 2 x 12 ranks = 24",
        ),
        (
            ["plan.rehearse=true", "plan.ranks=16", "plan.ranks_per_node=6"],
            "plan.ranks_per_node: is 6 but must divide the 16 ranks",
        ),
        (["plan.ranks_per_node=8"], "plan.ranks_per_node: requires a rehearsal; add plan.rehearse=true"),
        (["plan.device=l4", "device=cpu"], "device: is cpu but the plan is for NVIDIA L4; leave it out"),
        (["plan.ranks=0"], "plan.ranks: is 0 but must be at least 1"),
        (
            ["plan.rehearse=true", "plan.ranks=8", "distributed=ddp", "distributed.overlap_grad_reduce=true"],
            "distributed.overlap_grad_reduce: is true but ",
        ),
    ],
)
def test_invalid_rehearsal_options_are_rejected_without_creating_files(run_command, overrides, message):
    _, stderr = run_command(*RUN, *BATCH, *overrides, "hydra.run.dir=plan", module="foundry.plan", code=2)
    assert message in stderr
    assert "Traceback" not in stderr
    assert list(run_command.cwd.iterdir()) == []


def test_missing_compiler_error_names_the_remedy(run_command, monkeypatch, tmp_path):
    from foundry.rehearsal import guard

    if guard._has_own_guard():
        pytest.skip("a CUDA build of torch needs no compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no_cache"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    _, stderr = run_command(*RUN, *BATCH, *REHEARSAL, module="foundry.plan", code=2)
    assert stderr.startswith("plan.rehearse: is not possible: g++ is required ")
    assert "apt install g++" in stderr
    assert list(run_command.cwd.iterdir()) == []


def test_plan_json_is_kept_if_the_rehearsal_fails(run_command, monkeypatch):
    def fail(*arguments, **options):
        raise RehearsalError("the run failed in its rehearsal: ValueError: unknown token")

    monkeypatch.setattr(rehearsal, "rehearse", fail)
    monkeypatch.setattr(rehearsal, "reason_not_to_load", lambda: None)
    _, stderr = run_command(*RUN, *BATCH, *REHEARSAL, module="foundry.plan", code=1)
    assert stderr.splitlines()[-1] == "the run failed in its rehearsal: ValueError: unknown token"
    assert "rehearsal" not in json.loads((run_command.cwd / "plan" / "plan.json").read_text())


def report(rehearsed, expected=None, **changes):
    least = least_time(rehearsed, peak_flops=1e15, link_bandwidth=1e11, network_bandwidth=1e10)
    usual = {"expected": expected, "tokens_per_step": 2_000_000, "samples_per_step": 500, "usable_bytes": 4 * MIB}
    return RehearsalReport(record=rehearsed, least=least, **{**usual, **changes})


def table(shown, title):
    rows = dict(shown.sections())[title]
    return rows if title == "Rehearsal" else dict(rows)


def test_host_waits_are_listed_with_their_lines():
    waits = [
        HostWait(phase="step 2", operation="aten::_local_scalar_dense", where="foundry/x.py:7 loss.item()", count=3),
        HostWait(phase="step 1", operation="aten::nonzero", where="foundry/y.py:9", count=1),
    ]
    rows = table(report(record(host_waits=waits)), "Rehearsal")
    assert ("host waits", "3") in rows
    assert ("", "3 x aten::_local_scalar_dense at foundry/x.py:7 loss.item()") in rows
    assert not any("y.py" in value for _, value in rows)


def test_collective_counts_that_differ_from_the_formula_are_shown():
    gathers = record(collectives=[collective(count=10), collective(kind="broadcast", count=1)])
    shown = report(gathers, {"all_gather": 9, "all_reduce": 2})
    assert table(shown, "Collectives of a step")["by formula"] == "all_gather 9, all_reduce 2, broadcast 0"
    assert table(report(gathers), "Collectives of a step")["by formula"] == "unknown for this run"


def test_host_collectives_count_toward_the_formula():
    reduced = (
        collective(kind="all_reduce", count=3, bytes=1024),
        collective(kind="all_reduce", device="cpu", count=1, bytes=4),
    )
    rows = dict(report(record(collectives=reduced), {"all_reduce": 4}).sections())["Collectives of a step"]
    assert ("all_reduce", "1 among 8 ranks, 4 B, in host memory") in rows
    assert ("by formula", "the same") in rows


def test_rehearsal_tables_fit_into_80_columns():
    phases = ["starting", "step 2", "step 2, optimizer", "evaluating", "saving a checkpoint"]
    peaks = [Peak(phase=phase, bytes=MIB, parts={"gathered": MIB}) for phase in phases]
    plan = dict.fromkeys(Memory.__annotations__, MIB) | {"total": MIB}
    gathers = [collective(kind="reduce_scatter", group_size=1024, num_nodes=128, bytes=10**12)]
    shown = report(record(peaks=peaks, plan=plan, collectives=gathers), {"reduce_scatter": 10}).sections()
    width = max(len(name) for _, rows in shown for name, _ in rows)
    for _, rows in shown:
        assert all(2 + width + 2 + len(value) <= 80 for _, value in rows)


def test_peak_above_usable_memory_is_marked_as_not_fitting():
    rows = table(report(record()), "Rehearsal")
    assert ("peak memory", "5 MiB of 4 MiB, in step 2: DOES NOT FIT") in rows


def test_build_peak_excludes_the_first_step_check():
    peaks = list(record().peaks)
    peaks.insert(1, Peak(phase=CHECKING, bytes=4 * MIB, parts={"activations": 4 * MIB}))
    rows = table(report(record(peaks=peaks)), "Rehearsed memory per rank")
    assert rows["total"].split()[0] == "1.0"


def test_memory_table_lists_parts_by_phase_and_marks_unknown_values():
    plan = {"weights": MIB, "optimizer": None, "gathered": 0, "gradients": 0, "reducing": 0, "ema": 0, "frozen": 0}
    plan |= {"buffers": 0, "generation": 0, "activations_estimated": 3 * MIB, "total": 4 * MIB}
    rows = table(report(record(plan=plan)), "Rehearsed memory per rank")
    assert {name: value.split() for name, value in rows.items()} == {
        "peak in MiB": ["build", "passes", "optimizer", "plan"],
        "weights": ["1.0", "1.0", "1.0", "1.0"],
        "optimizer state": ["0.0", "0.0", "2.0", "?"],
        "activations": ["0.0", "4.0", "0.0", "3.0"],
        "total": ["1.0", "5.0", "3.0", "4.0"],
    }


def test_least_time_gives_tokens_or_samples_per_second():
    flops = record(flops={"step 2": 10**15}, attention=[Attention(phase="step 2", kernel="flash", query=(1,), count=2)])
    assert table(report(flops), "Least time of a step")["at least"] == "1 s a step, at most 2M tokens a second"
    without_tokens = report(flops, tokens_per_step=None)
    assert table(without_tokens, "Least time of a step")["at least"] == "1 s a step, at most 500 samples a second"
