"""`python -m foundry`: files, output and exit codes of runs, sampling and export."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from support.examples import some_of
from support.in_process import Commands
from support.run_events import free_port
from support.tiny import PLOTS, TINY_DIT, TINY_LM

PNG = b"\x89PNG\r\n"
LAYOUT = ["precision=fp32", "hparams.max_steps=3", "hparams.global_batch_size=8", "optimizer=adamw"]


def read(run_dir, name):
    return json.loads((run_dir / name).read_text())


def lines(run_dir, kind="loss"):
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record for record in records if kind in record]


def losses(run_dir):
    return [line["loss"] for line in lines(run_dir)]


def snapshot(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in folder.rglob("*")}


def test_run_directory_has_the_documented_files(lm):
    run_dir, stdout, stderr = lm
    names = {str(path.relative_to(run_dir)) for path in run_dir.rglob("*")}
    expected = {".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml", "config.yaml", "foundry.log"}
    expected |= {"status.json", "metrics.jsonl", "result.json", "plan.json", "tokenizer.json", "checkpoints/latest"}
    expected |= {"plots/loss.png", "plots/schedule.png", "plots/samples.txt", "checkpoints/step_00000005/manifest.json"}
    assert expected <= names
    assert not [name for name in names if name.endswith((".pt", ".pkl", ".partial", ".distcp"))]
    assert all((run_dir / "plots" / f"{name}.png").read_bytes().startswith(PNG) for name in ("loss", "schedule"))
    assert (run_dir / "plots" / "samples.txt").read_text().strip()
    log = (run_dir / "foundry.log").read_text()
    assert "[foundry.progress][INFO] step 5/5 " in log
    assert log.count("held-out loss") >= 2
    assert "Traceback" not in stdout + stderr
    assert "Warning" not in stderr
    assert list(run_dir.parent.iterdir()) == [run_dir]


def test_status_and_result_of_a_run_agree(lm):
    run_dir = lm[0]
    status, result = read(run_dir, "status.json"), read(run_dir, "result.json")
    assert (status["state"], status["reason"], status["step"]) == ("finished", "", 5)
    assert set(status) == {"state", "reason", "step", "config_hash", "started", "updated", "version"}
    assert (result["status"], result["step"], result["samples"], result["tokens"]) == ("finished", 5, 40, 40 * 32)
    assert result["config_hash"] == status["config_hash"]
    assert result["metric"] == result["val_loss"] == lines(run_dir, "val_loss")[-1]["val_loss"]
    assert result["loss"] == losses(run_dir)[-1]
    assert result["best"]["val_loss"] == min(line["val_loss"] for line in lines(run_dir, "val_loss"))


def test_each_logged_step_has_the_metric_keys(lm):
    logged = lines(lm[0])
    keys = {"step", "samples", "tokens", "epoch", "loss", "lr", "weight_decay", "grad_norm", "global_batch_size"}
    for number, line in enumerate(logged, start=1):
        assert keys | {"tokens_per_second", "step_seconds"} <= set(line)
        assert (line["step"], line["samples"], line["tokens"]) == (number, 8 * number, 8 * 32 * number)
        assert line["step_seconds"] > 0
    assert len(logged) == 5
    assert {"step", "samples", "val_loss"} <= set(lines(lm[0], "val_loss")[0])


def test_plan_of_a_run_is_consistent(lm, digits):
    for run_dir in (lm[0], digits):
        plan, config = read(run_dir, "plan.json"), yaml.safe_load((run_dir / "config.yaml").read_text())
        assert plan["accum_freq"] * plan["world_size"] * plan["per_gpu_batch_size"] == plan["global_batch_size"]
        assert plan["total_samples"] == plan["total_steps"] * plan["global_batch_size"]
        assert plan["total_samples"] == read(run_dir, "result.json")["samples"]
        assert plan["accum_freq"] == config["hparams"]["accum_freq"]
        assert plan["lr_decay_steps"] == plan["total_steps"] == 5
        assert plan["lr_warmup_steps"] == pytest.approx(0.05 * 5)
        assert 0 < plan["trainable_parameters"] == plan["parameters"]
    assert read(digits, "plan.json")["wsd_decay_steps"] == pytest.approx(0.3 * 5)
    assert read(lm[0], "plan.json")["total_tokens"] == 5 * 8 * 32


def test_repeated_command_of_a_finished_run_changes_no_files(lm, cache):
    run_command = Commands(lm[0].parent, cache)
    written = ("foundry.log", ".lock")
    kept = {k: v for k, v in snapshot(lm[0]).items() if ".hydra" not in str(k) and k.name not in written}
    stdout, stderr = run_command(*TINY_LM, *PLOTS, "hydra.run.dir=run", "hparams.ema_decay=0.9")
    assert "finished" in stdout + stderr
    after = snapshot(lm[0])
    assert {path for path in kept if after.get(path) != kept[path]} - {lm[0]} == set()


def test_diffusion_run_writes_a_sample_image(digits):
    assert (digits / "plots" / "samples.png").read_bytes().startswith(PNG)
    assert read(digits, "status.json")["state"] == "finished"
    assert not (digits / "tokenizer.json").exists()
    assert "tokens" not in lines(digits)[0]
    assert lines(digits)[0]["samples_per_second"] > 0


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["data=text", "data.path=tiny.txt"], "data."),
        ([*TINY_LM, "data.seq_len=1000000"], "data.seq_len"),
        ([*TINY_LM, "scheduler.warmup=1 epochs"], "scheduler.warmup"),
    ],
    ids=["tiny-text", "seq-len", "warmup"],
)
def test_settings_that_do_not_fit_the_data_are_refused_without_files(run_command, overrides, key):
    (run_command.cwd / "tiny.txt").write_text("too little\n")
    stdout, stderr = run_command(*overrides, code=2)
    assert stdout == ""
    assert stderr.startswith(key)
    assert stderr.count("\n") == 1
    assert [path.name for path in run_command.cwd.iterdir()] == ["tiny.txt"]


def test_failing_constructor_of_a_component_leaves_a_traceback(run_command):
    (run_command.cwd / "conf" / "model").mkdir(parents=True)
    (run_command.cwd / "conf" / "model" / "mine.yaml").write_text("_target_: mine.Broken\nwidth: 3\n")
    code = "class Broken:\n    def __init__(self, *, width):\n        raise ValueError(f'no model of width {width}')\n"
    (run_command.cwd / "mine.py").write_text(code)
    overrides = ["--config-dir=conf", *TINY_DIT[:2], "model=mine", "hydra.run.dir=run"]
    stderr = run_command(*overrides, code=1, variables={"PYTHONPATH": str(run_command.cwd)})[1]
    assert "Traceback" in stderr
    assert "no model of width 3" in stderr
    assert "mine.py" in stderr
    status = read(run_command.cwd / "run", "status.json")
    assert (status["state"], status["reason"]) == ("failed", "ValueError: no model of width 3")


def test_component_failure_in_training_is_recorded_in_the_status(run_command):
    (run_command.cwd / "conf" / "objective").mkdir(parents=True)
    (run_command.cwd / "conf" / "objective" / "mine.yaml").write_text("_target_: mine.Broken\n")
    code = "\n".join(
        [
            "class Broken:",
            "    def num_valid(self, microbatch):",
            "        return 1",
            "    def loss(self, model, microbatch):",
            "        raise ValueError('first line\\nlast line')",
        ]
    )
    (run_command.cwd / "mine.py").write_text(code)
    overrides = ["--config-dir=conf", *TINY_LM[:7], "objective=mine", "hydra.run.dir=run"]
    stderr = run_command(*overrides, code=1, variables={"PYTHONPATH": str(run_command.cwd)})[1]
    assert "last line" in stderr
    assert "mine.py" in stderr
    status = read(run_command.cwd / "run", "status.json")
    assert status["state"] == "failed"
    assert "ValueError" in status["reason"]
    assert "\n" not in status["reason"]


def test_non_finite_loss_fails_the_run_and_names_the_step(run_command):
    overrides = [*TINY_LM, "hparams.lr=1e30", "optimizer=adamw", "scheduler.warmup=0", "hparams.grad_clip_norm=null"]
    stderr = run_command(*overrides, "hydra.run.dir=run", code=1)[1]
    status = read(run_command.cwd / "run", "status.json")
    assert status["state"] == "failed"
    assert "NonFiniteError: step 2: " in status["reason"]
    assert status["reason"] in stderr
    assert not (run_command.cwd / "run" / "checkpoints").exists()


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache):
    """Losses of three steps in one process."""
    run_command = Commands(tmp_path_factory.mktemp("alone"), cache)
    run_command(*TINY_LM, *LAYOUT, "hparams.per_gpu_batch_size=8", "hydra.run.dir=run")
    return losses(run_command.cwd / "run")


def assert_one_run(shell, stdout, stderr, expected):
    (run_dir,) = (shell.cwd / "runs").iterdir()
    assert losses(run_dir) == pytest.approx(expected, rel=1e-5)
    assert [path.name for path in shell.cwd.iterdir()] == ["runs"]
    assert read(run_dir, "plan.json")["world_size"] == 2
    assert read(run_dir, "status.json")["state"] == "finished"
    message = [line for line in stdout.splitlines() if line.startswith("step ")]
    assert len(message) == len(set(message)), "a line was printed twice"
    assert sum("step 1/3" in line for line in message) == 1
    assert "Warning" not in stderr
    assert "Traceback" not in stderr


@pytest.mark.distributed
@pytest.mark.parametrize("starts", some_of(["shell", "cold_shell"], "shell"))
def test_two_fsdp_processes_match_one_process(request, alone, starts):
    command = request.getfixturevalue(starts)
    overrides = ["distributed=fsdp", "distributed.nproc_per_node=2", "hparams.per_gpu_batch_size=4"]
    assert_one_run(command, *command.run(*TINY_LM, *LAYOUT, *overrides), alone)


@pytest.mark.long
def test_torchcompile_with_grad_checkpointing_matches_plain_losses(shell, alone):
    overrides = ["hparams.per_gpu_batch_size=8", "hparams.torchcompile=true", "hparams.grad_checkpointing=true"]
    shell.run(*TINY_LM, *LAYOUT, *overrides, "hydra.run.dir=run")
    assert losses(shell.cwd / "run") == pytest.approx(alone, rel=1e-5)


@pytest.mark.long
@pytest.mark.distributed
def test_torchrun_matches_one_process(cold_shell, alone):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
    message = cold_shell.run(*TINY_LM, *LAYOUT, "hparams.per_gpu_batch_size=4", command=[*torchrun, "-m"])
    assert_one_run(cold_shell, *message, alone)


@pytest.mark.long
@pytest.mark.distributed
def test_slurm_step_of_two_tasks_matches_one_process(shell, alone):
    step = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"SLURM_STEP_NODELIST": "127.0.0.1", "SLURM_STEP_TASKS_PER_NODE": "2", "MASTER_PORT": str(free_port())}
    overrides = [*TINY_LM, *LAYOUT, "hparams.per_gpu_batch_size=4"]
    tasks = [
        shell.start(*overrides, variables={**step, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)})
        for rank in range(2)
    ]
    message = [task.communicate(timeout=240) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], message
    assert message[1][0] == ""
    assert_one_run(shell, message[0][0] + message[1][0], message[0][1] + message[1][1], alone)


def test_sweep_runs_every_job(shell):
    overrides = [*TINY_DIT, "hparams.max_steps=2", "hparams.lr=1e-3,2e-3", "hydra.sweep.dir=sweep"]
    shell.run("-m", *overrides)
    jobs = sorted(path for path in (shell.cwd / "sweep").iterdir() if path.is_dir())
    assert [path.name for path in jobs] == ["0", "1"]
    for job, lr in zip(jobs, (1e-3, 2e-3), strict=True):
        assert read(job, "status.json")["state"] == "finished"
        assert yaml.safe_load((job / "config.yaml").read_text())["hparams"]["lr"] == lr
    assert losses(jobs[0])[-1] != losses(jobs[1])[-1]


@pytest.mark.parametrize("model", ["hf_llama", pytest.param("hf_gpt2", marks=pytest.mark.long)])
def test_transformers_model_trains_and_exports(run_command, model):
    sizes = {
        "hf_llama": "{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2}",
        "hf_gpt2": "{n_embd: 32, n_layer: 2, n_head: 2}",
    }
    overrides = [w for w in TINY_LM if not w.startswith("model.")]
    if model == "hf_llama":
        overrides += ["model.config.num_key_value_heads=2"]
    config = [f"model.config.{item.strip(' {}').replace(': ', '=')}" for item in sizes[model].split(",")]
    run_command(*overrides, f"model={model}", *config, "hydra.run.dir=run")
    assert len(losses(run_command.cwd / "run")) == 5
    assert (run_command.cwd / "run" / "plots" / "samples.txt").is_file()
    run_command("run=run", "out=exported", module="foundry.export")
    assert (run_command.cwd / "exported" / "config.json").is_file()


def test_sample_writes_text_from_a_checkpoint(lm, run_command):
    overrides = [f"run={lm[0]}", "prompt='def main('", "max_new_tokens=8", "temperature=0"]
    stdout = run_command(*overrides, "out=drawn", module="foundry.sample")[0]
    assert "def main(" in stdout
    text = (run_command.cwd / "drawn.txt").read_text()
    assert "def main(" in text
    assert run_command(*overrides, "out=again", module="foundry.sample")[0] == stdout.replace("drawn", "again")
    shutil.copytree(lm[0], run_command.cwd / "copy", symlinks=True)
    trained = (run_command.cwd / "copy/plots/samples.txt").read_text()
    run_command("run=copy", *overrides[1:], module="foundry.sample")
    assert (run_command.cwd / "copy/plots/samples.txt").read_text() == trained
    assert trained.startswith("step 5, temperature 0.8, seed 0\n")
    page = (run_command.cwd / "copy/plots/drawn_step_00000005.txt").read_text()
    assert page == text
    assert page.startswith("step 5, temperature 0.0, seed 0\n")


def test_sample_draws_digits_from_a_checkpoint(digits, run_command):
    run_command(f"run={digits}", "out=pictures/drawn", "labels=[3,1]", "steps=3", module="foundry.sample")
    assert (run_command.cwd / "pictures" / "drawn.png").read_bytes().startswith(PNG)
    stderr = run_command(f"run={digits}", "prompt=hello", module="foundry.sample", code=2)[1]
    assert stderr.startswith("prompt: is not an option of objective Diffusion")
    stderr = run_command(f"run={digits}", "which=7", module="foundry.sample", code=2)[1]
    assert "has no checkpoint '7'; available: " in stderr
    assert "step_00000005" in stderr


def test_export_loads_in_transformers_with_the_same_logits(lm, run_command):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from foundry.engine.restore import restore

    run_command(f"run={lm[0]}", "out=exported", "ema=false", module="foundry.export")
    exported = run_command.cwd / "exported"
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in exported.iterdir()}
    restored = restore(str(lm[0]), "last", ema=False)
    loaded = AutoModelForCausalLM.from_pretrained(exported).eval()
    tokens = torch.randint(4096, (2, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = restored.model(tokens, return_logits=True).logits, loaded(tokens).logits
    torch.testing.assert_close(theirs, ours.float(), atol=1e-5, rtol=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(exported)
    text = "def main(words):\n\treturn 'grüße', 3.25\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    assert tokenizer(text)["input_ids"] == restored.data.tokenizer.encode(text).ids
    averaged = run_command(f"run={lm[0]}", "out=averaged", module="foundry.export")
    assert str(Path(averaged[0].strip())) == "averaged"
    weights = [path.joinpath("model.safetensors").read_bytes() for path in (exported, run_command.cwd / "averaged")]
    assert weights[0] != weights[1]
    stderr = run_command(f"run={lm[0]}", "out=exported", module="foundry.export", code=2)[1]
    assert stderr.startswith("out: is exported, which exists and is not an empty folder")
