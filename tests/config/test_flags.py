"""Unknown flags give exit code 2 and one line each, which suggests an override or a flag."""

import pytest
from hydra._internal.utils import get_args_parser
from support.composition import compose

from foundry.config.diagnostics.flags import HYDRA_FLAGS, arrange_flags, check_flags, split_flags
from foundry.core.errors import ConfigError

# (arguments, expected error lines)
CASES = [
    (["--lr", "3e-4"], ["--lr 3e-4: is not a valid argument; write hparams.lr=3e-4"]),
    (["-lr", "3e-4"], ["-lr 3e-4: is not a valid argument; write hparams.lr=3e-4"]),
    (["--lr=3e-4"], ["--lr=3e-4: is not a valid argument; write hparams.lr=3e-4"]),
    (["--hparams.lr", "3e-4"], ["--hparams.lr 3e-4: is not a valid argument; write hparams.lr=3e-4"]),
    (["--optimizer", "sgd"], ["--optimizer sgd: is not a valid argument; write optimizer=sgd"]),
    (["--hydra.run.dir=x"], ["--hydra.run.dir=x: is not a valid argument; write hydra.run.dir=x"]),
    (["--max-grad-norm", "-1"], ["--max-grad-norm -1: is not a valid argument; write hparams.grad_clip_norm=-1"]),
    (
        ["--bf16", "hparams.seed=1"],
        ["--bf16: is not a valid argument; write precision=amp_bf16 (weights stay in fp32)"],
    ),
    (
        ["--no-gradient-checkpointing"],
        ["--no-gradient-checkpointing: is not a valid argument; write hparams.grad_checkpointing=false"],
    ),
    (["--verison"], ["--verison: is not a valid argument; did you mean --version?"]),
    (["--halp", "optimizer=sgd"], ["--halp: is not a valid argument; did you mean --help?"]),
    (["--mutlirun"], ["--mutlirun: is not a valid argument; did you mean --multirun?"]),
    (["--no_cuda"], ["--no_cuda: is not a valid argument; write device=cpu"]),
    (
        ["--betas", "0.9", "0.95", "-m"],
        ["--betas 0.9 0.95: is not a valid argument; write optimizer.beta1=0.9 optimizer.beta2=0.95"],
    ),
    (["--config", "a/my.yaml"], ["--config a/my.yaml: is not a valid argument; write --config-dir a --config-name my"]),
    (["--config=my.yaml"], ["--config=my.yaml: is not a valid argument; write --config-dir . --config-name my"]),
    (
        ["--config_path", "x.yaml", "--distributed.fsdp", "true"],
        [
            "--config_path x.yaml: is not a valid argument; write --config-dir . --config-name x",
            "--distributed.fsdp true: is not a valid argument; write distributed=fsdp",
        ],
    ),
    (["--frobnicate"], ["--frobnicate: is not a valid argument; give settings as key=value"]),
    (["--hparams.leer", "1"], ["--hparams.leer 1: is not a valid argument; did you mean hparams.lr?"]),
]


@pytest.mark.parametrize(("arguments", "lines"), CASES, ids=[" ".join(words) for words, _ in CASES])
def test_unknown_flag_error_suggests_the_override(arguments, lines):
    with pytest.raises(ConfigError) as refused:
        check_flags(arguments)
    # Without a composition, the optimizer is unknown: the suggestion may include optimizer=adamw.
    assert [
        line.replace("optimizer=adamw optimizer.beta1", "optimizer.beta1") for line in str(refused.value).splitlines()
    ] == lines


@pytest.mark.parametrize(
    "arguments",
    [
        ["--cfg", "job", "--resolve", "-m", "hparams.lr=1,2"],
        ["-cn", "own", "--config-dir=x", "-p", "hparams", "-cjob", "--info", "defaults"],
        ["--resol", "--multi", "hparams.lr=-1", "-", "scheduler.warmup=10"],
    ],
)
def test_hydra_flags_are_accepted(arguments):
    check_flags(arguments)
    assert split_flags(arguments, HYDRA_FLAGS) == ([], arguments)


@pytest.mark.parametrize(
    ("arguments", "arranged"),
    [
        (["a=1", "--cfg", "job", "b=2", "-m", "c=3"], ["--cfg", "job", "-m", "a=1", "b=2", "c=3"]),
        (["a=1", "--cfg=job", "--resolve", "b=2"], ["--cfg", "job", "--resolve", "a=1", "b=2"]),
        (["a=1", "--info", "b=2", "-i", "defaults", "-"], ["--info=all", "-i=defaults", "a=1", "b=2", "-"]),
        (["a=1", "-cjob", "a=-1"], ["-cjob", "a=1", "a=-1"]),
        (["a=1", "--package"], ["--package", "a=1"]),
    ],
)
def test_arrange_flags_moves_hydra_flags_before_overrides(arguments, arranged):
    assert arrange_flags(arguments) == arranged


def test_overrides_before_and_after_flags_are_composed(run_command):
    (run_command.cwd / "own").mkdir()
    (run_command.cwd / "own" / "mine.yaml").write_text("defaults: [config, _self_]\nhparams: {seed: 17}\n")
    words = ["hparams.max_steps=3", "--config-dir", "own", "hparams.lr=0.5", "--config-name", "mine", "--cfg", "job"]
    stdout, _ = run_command(*words, "optimizer=sgd", "--package", "hparams", "debug=fast")
    assert all(line in stdout for line in ("max_steps: 3", "lr: 0.5", "seed: 17"))


def test_flag_table_matches_the_hydra_parser():
    actions = [action for action in get_args_parser()._actions if action.option_strings]
    assert {name for action in actions for name in action.option_strings} == set(HYDRA_FLAGS)
    takes = {name for action in actions if action.nargs is None for name in action.option_strings}
    assert takes == {name for name, number in HYDRA_FLAGS.items() if number}
    (info,) = (action for action in actions if action.nargs == "?")
    assert (info.option_strings, info.const) == (["--info", "-i"], "all")
    assert all(arrange_flags(["--info", value]) == [f"--info={value}"] for value in info.choices)


@pytest.mark.parametrize(
    "line", [lines[0] for _, lines in CASES if "; write " in lines[0] and "--config" not in lines[0]]
)
def test_suggested_overrides_of_flags_compose(line):
    words = line.partition("; write ")[2].partition(" (")[0].split()
    if "hparams.grad_clip_norm=-1" in words:  # the key is right, the value as typed is not
        with pytest.raises(ConfigError, match=r"^hparams\.grad_clip_norm: is -1 but must be"):
            compose(*words)
        return
    compose("optimizer=adamw", *[word for word in words if word != "optimizer=adamw" and word != "optimizer=sgd"])


@pytest.mark.parametrize(
    ("module", "arguments", "lines"),
    [
        ("foundry", ["--lr", "3e-4"], ["--lr 3e-4: is not a valid argument; write hparams.lr=3e-4"]),
        (
            "foundry.plan",
            ["--every", "2", "--plan.device", "h100", "--lr", "1"],
            [
                "--every 2: is not a valid argument; write every=2",
                "--plan.device h100: is not a valid argument; write plan.device=h100",
                "--lr 1: is not a valid argument; write hparams.lr=1",
            ],
        ),
        (
            "foundry.sample",
            ["--run", "runs/x", "--prompt=a", "--tempratur", "1"],
            [
                "--run runs/x: is not a valid argument; write run=runs/x",
                "--prompt=a: is not a valid argument; write prompt=a",
                "--tempratur 1: is not a valid argument; give options as key=value; did you mean temperature? (options",
            ],
        ),
    ],
)
def test_every_command_suggests_overrides_for_flags(module, arguments, lines, run_command):
    stdout, stderr = run_command(*arguments, module=module, code=2)
    assert stdout == ""
    assert len(stderr.splitlines()) == len(lines)
    for line, expected in zip(stderr.splitlines(), lines, strict=True):
        assert line.startswith(expected)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["--lr", "3e-4", "hparams.seed=x", "optimizer=adamv"], ["--lr 3e-4", "optimizer", "hparams.seed"]),
        (["plan", "--every", "2", "hparams.seed=x"], ["--every 2", "hparams.seed"]),
        (["--lr", "3e-4", "hparams.seed=1", "hydra.run.dir=x"], ["--lr 3e-4"]),
        (["--lr", "3e-4", "-m", "hparams.seed=1,x"], ["--lr 3e-4"]),
        (["--config", "my.yaml", "mine=1"], ["--config my.yaml"]),
    ],
)
def test_invalid_overrides_are_reported_together_with_invalid_flags(words, keys, run_command):
    _, error = run_command(*words, code=2)
    assert [line.partition(": ")[0] for line in error.splitlines()] == keys
