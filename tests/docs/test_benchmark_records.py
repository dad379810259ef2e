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


def test_three_minutes_repeats_late_runs_with_fewer_steps_and_compares_by_welch(load_benchmark, monkeypatch, tmp_path):
    benchmark, taken = load_benchmark("three_minutes"), list[int]()
    track = benchmark.Track(tmp_path, 100.0, (), None)

    def run(self, entry, steps, seed=0, *, is_calibration=False):
        taken.append(steps)
        return {"seconds": 10 + steps * (1.0 if is_calibration else 1.1), "loss": 1.0}

    monkeypatch.setattr(benchmark.Track, "run", run)
    entry = benchmark.Entry("foundry")
    assert benchmark.Entry("foundry", ("hparams.lr=1",)).name == "foundry, `hparams.lr=1`"
    assert track.choose_steps(entry) == 87  # 10 + 87 x 1.0 is 97 % of 100
    assert track.run_in_time(entry, 87, 0)["steps"] == 79  # 105.7 s at first
    assert taken == [5, 25, 87, 79]
    with pytest.raises(RuntimeError, match=r"^foundry needs 11\.1 s for a step; increase --seconds$"):
        benchmark.Track(tmp_path, 5.0, (), None).run_in_time(entry, 4, 0)
    assert benchmark.difference([1.0, 1.2], [2.0, 2.2]) == "-1.0000 ± 0.6085"  # 4.303 x sqrt(0.02), 2 degrees
    assert benchmark.difference([1.0], [2.0]) == ""


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


def test_resume_fidelity_counts_samples_and_steps_of_continued_runs(load_benchmark, tmp_path):
    benchmark = load_benchmark("resume_fidelity")
    plan, rows = benchmark.SMOKE, {step: [4 * ((step - 1) % 4) + place for place in range(4)] for step in range(1, 9)}

    def trace(name, first, last, ids, unfinished=()):
        lines = [text for step in range(first, last + 1) for text in ({"ids": ids[step]}, {"step": step, "time": step})]
        text = "".join(json.dumps(line) + "\n" for line in (*lines, *({"ids": each} for each in unfinished)))
        (tmp_path / f"{name}.log.0").write_text(text + '{"ids": [1')
        return benchmark.Trace.read(tmp_path / f"{name}.log")

    whole, before = trace("whole", 1, 8, rows), trace("before", 1, 5, rows, unfinished=[[7, 7]])
    exact = benchmark.compare(plan, whole, before, trace("after", 5, 8, rows))
    assert exact == {"repeated": 0, "skipped": 0, "lost": 1}
    again = trace("again", 3, 8, rows | {3: rows[1], 4: rows[2]})  # its loader starts the epoch again
    assert benchmark.compare(plan, whole, before, again) == {"repeated": 8, "skipped": 8, "lost": 3}


def test_resume_fidelity_reports_refused_and_failed_runs(load_benchmark):
    benchmark = load_benchmark("resume_fidelity")
    moment = benchmark.Moment("save", 4, 0.5)
    values = {"apart": 0.0, "repeated": 0, "skipped": 0, "lost": 2, "seconds": 3.0}
    good = benchmark.Continued(moment, "", step=4, values=values)
    broken = benchmark.Continued(moment, "OSError: half a file", by_hand="")
    other = benchmark.Continued(moment, "ValueError: other ranks", by_hand="ValueError: other ranks")
    continued = {1: [good, broken], 2: [other, other]}
    measured = {"hf": benchmark.Measured(same_bits=True, other_ranks=0.1, save_seconds=0.01, continued=continued)}
    assert benchmark.row_of("HF Trainer", 1, continued[1]).values["equal"] == "1 of 1"
    assert benchmark.row_of("HF Trainer", 2, continued[2]).values["continued"] == "0 of 2"
    notes = "\n".join(benchmark.notes_of(benchmark.SMOKE, [moment], measured))
    assert "1 to 1, failed 1 of 2: `OSError: half a file`; it continued after its newest checkpoint was" in notes
    assert "1 to 2, refused 2 of 2: `ValueError: other ranks`; without its newest checkpoint: `ValueError" in notes
    assert benchmark.headline_of(measured).beside == "1 HF Trainer"
