import gzip
import json

import torch

from foundry.training.profiling import StepProfiler


def test_profiler_writes_a_trace_of_the_chosen_steps(tmp_path):
    profiler = StepProfiler(tmp_path / "profile", rank=1, steps=range(2, 4), device=torch.device("cpu"))
    for step in range(1, 6):
        with profiler.around(step):
            torch.ones(8) @ torch.ones(8)
    profiler.stop()
    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "trace-rank-00001.json.gz"
    names = [event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]]
    assert {name for name in names if str(name).startswith("step ")} == {"step 2", "step 3"}
    assert names.count("aten::dot") == 2


def test_profiler_keeps_the_trace_of_a_run_that_ends_early(tmp_path):
    profiler = StepProfiler(tmp_path / "profile", rank=0, steps=range(2, 9), device=torch.device("cpu"))
    with profiler.around(2):
        torch.ones(8).sum()
    profiler.stop()
    assert len(list((tmp_path / "profile").iterdir())) == 1


def test_profiler_without_chosen_steps_writes_nothing(tmp_path):
    profiler = StepProfiler(tmp_path / "profile", rank=0, steps=range(0), device=torch.device("cpu"))
    with profiler.around(1):
        pass
    profiler.stop()
    assert not (tmp_path / "profile").exists()
