"""Runs with the user's own components: required interfaces, and messages about missing parts of them."""

import json

import pytest
from support.in_process import Commands
from support.tiny import TINY_LM

OWN = r'''
import torch
from torch.optim import SGD, AdamW

from foundry.data.splits import DataSplits
from foundry.objectives.next_token import NextToken
from foundry.core.protocols import LossSum, Mean


def counting(*, seed, seq_len, vocab_size):
    rows = (torch.arange(32)[:, None] + torch.arange(seq_len + 1)) % vocab_size
    samples = [{"tokens": row[:-1], "targets": row[1:]} for row in rows]
    return DataSplits(train=samples[8:], validation=samples[:8], fingerprint="c", tokens_per_sample=seq_len)


class Flat:
    """A schedule without a warm-up."""

    def __init__(self, *, max_lr, budget):
        self.max_lr = max_lr

    def lr(self, samples_before, samples_after):
        return self.max_lr

    def weight_decay(self, samples_before, samples_after):
        return None

    def state_dict(self):
        return {}


class FormerSchedule(Flat):
    def lr(self, samples):
        return self.max_lr


def rows(*, seed, seq_len, vocab_size):
    return [counting(seed=seed, seq_len=seq_len, vocab_size=vocab_size)]


def description():
    return {"layers": 2}


class Judged(NextToken):
    def loss(self, model, microbatch):
        part = super().loss(model, microbatch)
        return LossSum(part.loss, {"extra": Mean(part.loss.detach())})


class Table:
    def save(self, stem):
        stem.with_suffix(".csv").write_text("0,1\n")
        return stem.with_suffix(".csv")


class Tabulated(NextToken):
    def generate(self, model, data, device, **options):
        return Table()


def whole(*, model, lr):
    return [SGD(model.parameters(), lr=lr)]


def bare(*, model, lr):
    return SGD(model.parameters(), lr=lr)


def nothing(*, model, lr):
    return None


def classes(*, model, lr):
    return [SGD]


def part(*, model, lr):
    return [SGD([p for n, p in model.named_parameters() if "norm" not in n], lr=lr)]


def doubled(*, model, lr):
    return [SGD(model.parameters(), lr=lr), AdamW(list(model.parameters())[:1], lr=lr)]


def strange(*, model, lr):
    return [SGD([*model.parameters(), torch.nn.Parameter(torch.ones(2))], lr=lr)]
'''
DATA = "_target_: own.counting\nseq_len: 32\nvocab_size: 64\n"
SMALL = [*TINY_LM[:6], "data=own", "tracking=none", "evaluation.write_samples=false", "hydra.run.dir=run"]


@pytest.fixture
def run_command(tmp_path, cache):
    run_command = Commands(tmp_path, cache, {"PYTHONPATH": "."})
    (tmp_path / "own.py").write_text(OWN)
    for group, text in {"data": DATA, "scheduler": "_target_: own.Flat\n"}.items():
        (tmp_path / "conf" / group).mkdir(parents=True)
        (tmp_path / "conf" / group / "own.yaml").write_text(text)
    for name in ("whole", "bare", "nothing", "classes", "part", "doubled", "strange"):
        path = tmp_path / "conf" / "optimizer" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"_target_: own.{name}\n")
    return run_command


def run(run_command, *overrides, code=0):
    return run_command("--config-dir=conf", *SMALL, *overrides, code=code)


@pytest.mark.long
def test_own_scheduler_needs_no_warmup_and_own_data_no_num_workers(run_command, shell):
    shell.run(
        "--config-dir=conf",
        *SMALL,
        "scheduler=own",
        "optimizer=whole",
        "+data.num_workers=1",
        variables={"PYTHONPATH": "."},
    )
    assert json.loads((run_command.cwd / "run" / "status.json").read_text())["state"] == "finished"
    lines = [json.loads(line) for line in (run_command.cwd / "run" / "metrics.jsonl").open()]
    assert {line["lr"] for line in lines if "lr" in line} == {4e-3}


@pytest.mark.long
def test_num_workers_override_of_own_data_needs_a_plus(run_command):
    _, stderr = run(run_command, "data.num_workers=1", code=2)
    assert stderr == "data.num_workers: is not a key of your own data; to add it write +data.num_workers=...\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bare", "returns an object of type SGD, not a list of optimizers; return [optimizer]"),
        ("nothing", "returns nothing, not a list of optimizers; return [torch.optim.AdamW(...)]"),
        ("classes", "returns a list with an object of type type, which is not a torch.optim.Optimizer"),
        ("part", "leaves out 9 of 25 trainable parameters: "),
        (
            "doubled",
            "takes model.embed_tokens.weight more than once; give each ",
        ),
        ("strange", "takes 1 tensor not among the parameters of the given model; use model.parameters()"),
    ],
)
def test_own_optimizer_must_take_each_trainable_parameter_once(run_command, name, message):
    _, stderr = run(run_command, f"optimizer={name}", code=2)
    (line,) = [line for line in stderr.splitlines() if line.startswith("optimizer")]
    assert line.startswith(f"optimizer._target_: is own.{name}, which {message}")
    assert not (run_command.cwd / "run").exists()


@pytest.mark.parametrize(
    ("group", "option", "message"),
    [
        ("data", DATA.replace("counting", "rows"), "of type list but must return foundry.DataSplits"),
        ("model", "_target_: own.description\n", "of type dict but must return a torch.nn.Module"),
        (
            "scheduler",
            "_target_: own.FormerSchedule\n",
            "of type FormerSchedule, whose lr(samples) does not accept a call of lr(samples_before, samples_after)",
        ),
    ],
)
def test_own_part_of_another_type_is_refused_before_the_first_step(run_command, group, option, message):
    path = run_command.cwd / "conf" / group / "other.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(option)
    words = [word for word in SMALL if not word.startswith("model.")]  # which a model of another package may not have
    _, stderr = run_command("--config-dir=conf", *words, "optimizer=whole", f"{group}=other", code=2)
    assert f"{group}._target_: returns an object {message}\n" in stderr
    assert not (run_command.cwd / "run" / "metrics.jsonl").exists()


@pytest.mark.long
def test_keep_best_metric_unknown_until_evaluation_fails_the_run(run_command):
    _, stderr = run(run_command, "objective._target_=own.Judged", "checkpoint.keep_best.metric=val_extr", code=2)
    message = "checkpoint.keep_best.metric: is val_extr but evaluations measure val_loss, val_extra; did you mean "
    message += "val_extra?"
    assert stderr.splitlines()[-1] == message
    status = json.loads((run_command.cwd / "run" / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("failed", message)


def test_sweep_refuses_a_missing_target_before_any_job_starts(run_command):
    (run_command.cwd / "conf" / "optimizer" / "misspelt.yaml").write_text("_target_: own.hole\n")
    overrides = ["-m", "--config-dir=conf", *SMALL[:-1], "optimizer=whole,misspelt", "hparams.seed=range(20)"]
    _, stderr = run_command(*overrides, "hydra.sweep.dir=sweep", code=2)
    assert stderr.startswith("optimizer._target_: is own.hole but own has no hole; did you mean whole? (20 of 40 jobs")
    assert not (run_command.cwd / "sweep").exists()


def test_samples_with_their_own_suffix_do_not_overwrite_a_file(run_command):
    run(run_command, "optimizer=whole", "objective._target_=own.Tabulated", "hparams.max_steps=1")
    words = ("run=run", "out=table", "trust=true")
    thesis = run_command.cwd / "table.csv"
    thesis.write_text("mine")
    _, stderr = run_command(*words, module="foundry.sample", code=2)
    assert stderr == "out: is table.csv, which exists; choose another path, or move it away\n"
    assert thesis.read_text() == "mine"
    thesis.unlink()
    run_command(*words, module="foundry.sample")
    assert thesis.read_text() == "0,1\n"
    assert not list(run_command.cwd.glob(".samples*"))
