"""Benchmarks: comparison of foundry with other libraries, records, and the pages generated from the records."""

import importlib
import json

import pytest
from support.scripts import ROOT


@pytest.fixture
def load_benchmark(monkeypatch):
    """Return a function that imports a module of benchmarks/."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module


def test_losses_apart_rejects_sides_with_other_losses_or_steps(load_benchmark):
    losses_apart = load_benchmark("comparison").losses_apart
    assert losses_apart({"raw": [{"losses": [2.0, 1.0]}], "foundry": [{"losses": [2.0, 1.001]}]})["foundry"] < 0.0011
    with pytest.raises(RuntimeError, match=r"^foundry does not train as raw does"):
        losses_apart({"raw": [{"losses": [2.0, 1.0]}], "foundry": [{"losses": [2.0, 1.1]}]})
    with pytest.raises(RuntimeError, match=r"^foundry does not train as raw does"):
        losses_apart({"raw": [{"losses": [2.0]}], "foundry": [{"losses": [float("nan")]}]})
    with pytest.raises(RuntimeError, match="took 1 steps instead of 2"):
        losses_apart({"raw": [{"losses": [2.0, 1.0]}], "foundry": [{"losses": [2.0]}]})


def test_in_turn_reverses_the_order_of_sides_each_round(load_benchmark):
    order = []
    load_benchmark("comparison").in_turn(["a", "b"], 3, lambda side, number: order.append((number, side)))
    assert order == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


def test_benchmark_pages_match_the_records(load_benchmark):
    page = load_benchmark("page")
    records = page.read_records()
    assert records, "there are records"
    for file, remade in ((page.PAGE, page.page_with_tables), (page.README, page.readme_with_table)):
        text = file.read_text()
        assert remade(text, records) == text, "run python benchmarks/page.py"
    for record in records.values():
        assert f"<!-- benchmarks/results/{record.name}.json -->" in page.PAGE.read_text()
        assert type(record).from_json(record.to_json()) == record
        assert not record.chart or (page.IMAGES / page.image_name(record)).is_file()


def test_robots_page_has_success_rates_of_policy_records(load_benchmark):
    record = load_benchmark("page").read_records()["policies"]
    lines = (ROOT / "docs" / "tasks" / "robots.md").read_text().splitlines()
    for row in record.rows:
        success = f"{row.values['success'][0]:.3f}"
        if row.side == "after one step":
            assert f"After one step FetchPush is {success}" in "\n".join(lines)
            continue
        (line,) = [line for line in lines if line.startswith(f"| {row.case} | {row.values['episodes'][0]} |")]
        assert success in line
        assert f"{row.values['cpu'][0]:.0f}" in line or "seed" in row.side


def test_robots_page_has_success_rates_of_vla_records(load_benchmark):
    record, text = load_benchmark("page").read_records()["vla"], (ROOT / "docs" / "tasks" / "robots.md").read_text()
    told = {row.side: f"{row.values['success'][0]:.3f}" for row in record.rows}
    on_vlm, alone = "from `experiment=vlm_scenes`", "from nothing"
    for line, side in ((f"| {on_vlm}, 0.99 of", on_vlm), ("| without one (`model.backbone.init_from=null`)", alone)):
        (found,) = [each for each in text.splitlines() if each.startswith(line)]
        cells = [cell.strip(" *") for cell in found.split("|")[2:4]]
        assert cells == [told[side], told[f"{side}, told another colour"]]


def finetuning_run(tokens, seconds, losses=(2.0, 1.0)):
    """Return measurements of one library (side) in one round of finetuning_trl.py."""
    memory = {"peak_mib": 100 * seconds, "grown_mib": 10 * seconds}
    clocks = {"cpu_seconds": seconds, "process_cpu_seconds": seconds + 5, "prepared_cpu_seconds": 0.0}
    return {"tokens": tokens, "losses": list(losses), **clocks, **memory}


def test_finetuning_compares_with_the_best_trl_side(load_benchmark):
    benchmark = load_benchmark("finetuning_trl")
    rounds = {"TRL": 10, "TRL, padding_free": 5, "foundry": 8, "foundry, model=hf": 8, "foundry, packed": 4}
    found = {side: [finetuning_run(100, seconds)] * 2 for side, seconds in rounds.items()}
    found["TRL, packing"] = [finetuning_run(100, 6, losses=[9.0])] * 2
    rows = {row.side: row.values for row in benchmark.rows_of("sft", found)}
    assert {side: values["of_speed"][0] for side, values in rows.items()} == {
        "TRL": 0.5,
        "TRL, padding_free": 1.0,
        "foundry": 5 / 8,
        "foundry, model=hf": 5 / 8,
        "foundry, packed": 1.25,
        "TRL, packing": pytest.approx(5 / 6),
    }
    assert rows["foundry"]["of_peak_mib"] == [1.6]
    assert rows["TRL, packing"]["apart"] == "another order"
    headline = benchmark.headline_of(benchmark.rows_of("sft", found))
    assert headline.foundry == "25 (packed), 12 (model=hf)"
    assert headline.beside == "TRL: 20 (padding_free), 10 (default)"
    found["TRL, packing"] = [finetuning_run(100, 2, losses=[9.0])] * 2
    headline = benchmark.headline_of(benchmark.rows_of("sft", found))
    assert headline.beside == "TRL: 50 (packing, another order), 20 (padding_free), 10 (default)"


@pytest.mark.parametrize("run", [finetuning_run(99, 5), finetuning_run(100, 5, losses=[2.0, 1.1])])
def test_finetuning_rejects_a_side_with_other_tokens_or_losses(load_benchmark, run):
    benchmark = load_benchmark("finetuning_trl")
    with pytest.raises(RuntimeError, match=r"useful tokens|foundry does not train as TRL does"):
        benchmark.rows_of("sft", {"TRL": [finetuning_run(100, 10)], "foundry": [run]})


def test_meter_adds_the_pass_before_the_first_step(load_benchmark, monkeypatch, tmp_path):
    module, clock = load_benchmark("meter"), [0.0]
    monkeypatch.setattr(module, "_clocks", lambda: (clock[0], 2 * clock[0]))
    meter = module.Meter()

    def work(seconds):
        clock[0] += seconds

    with meter.preparing():
        work(5)
    work(100)  # imports and data, which are not measured
    meter.start()
    for seconds in (3, 1, 1):
        work(seconds)
        meter.step(10)
    found = []
    for num_warmup in (0, 1):
        meter.write(tmp_path / "measured.json", num_warmup)
        measured = json.loads((tmp_path / "measured.json").read_text())
        found.append([measured[key] for key in ("tokens", "wall_seconds", "cpu_seconds")])
    assert found == [[30, 10, 20], [20, 2, 4]]


def test_benchmark_table_has_medians_and_spreads(load_benchmark):
    records = load_benchmark("records")
    record = records.Record(
        name="x",
        command="python benchmarks/x.py",
        date="2026-11-23",
        commit="0123456",
        conditions="",
        machine={"cpu": "a processor", "cores": 2, "memory_gib": 24, "gpu": None},
        versions={"Python": "3.11"},
        columns=[
            records.Column(key="speed", heading="tokens/s", spread=True),
            records.Column(key="why", heading="why"),
        ],
        rows=[
            records.Row(side="raw", values={"speed": [1000, 3000, 2000], "why": "a reason"}),
            records.Row(side="foundry", values={"speed": [2500]}),
        ],
    )
    assert record.table().splitlines()[2:] == [
        "| raw | 2,000 (1,000 to 3,000) | a reason |",
        "| foundry | 2,500 |  |",
    ]
