"""Errors in YAML files are reported with file and key, together with errors of the command line."""

import pytest

WRONG = """
defaults: [config, {override /scheduler: WSD}, _self_]
hparams:
  precision: amp_bfloat16
  lr_scheduler: cosine
  lr: 1e-4
  wd: 0.01
  seed: x
tracking:
  run_name: [a]
  sections: {a: 1, b: 2}
policy: {type: diffusion, frob: 1}
data: 3
"""
LINES = [
    "own/wrong.yaml: scheduler: has no option 'WSD'; write scheduler=wsd (options: ",
    "own/wrong.yaml: hparams.precision: is not a key of hparams; write precision=amp_bfloat16",
    "own/wrong.yaml: hparams.lr_scheduler: is not a key of hparams; write scheduler=cosine",
    "own/wrong.yaml: hparams.wd: is not a key of hparams; write optimizer.weight_decay=0.01",
    "own/wrong.yaml: hparams.seed: is x but must be a whole number",
    "own/wrong.yaml: tracking.run_name: is ['a'] but must be a string",
    "own/wrong.yaml: tracking.sections: is not a key of tracking",
    "own/wrong.yaml: policy.type: is not a key of policy; write hparams=policy objective=diffusion_policy",
    "own/wrong.yaml: policy: is neither a group nor a key",
    "own/wrong.yaml: data: is 3 but must be a mapping",
]


@pytest.fixture
def refusal(run_command):
    """Write option files under `own`, run a command that must fail, and return its error lines."""

    def refused(*words, **files):
        for name, text in files.items():
            path = run_command.cwd / "own" / name.replace("_in_", "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.with_suffix(".yaml").write_text(text)
        stdout, stderr = run_command(*words, code=2)
        assert stdout == ""
        return stderr.splitlines()

    return refused


@pytest.mark.long
def test_file_and_command_line_errors_are_reported_together(refusal):
    words = ["--config-dir", "own", "--config-name", "wrong", "optimizer=adamx", "hparams.leer=3", "GBS=64"]
    lines = refusal(*words, wrong=WRONG)
    assert lines[0].startswith("optimizer: has no option 'adamx'")
    assert lines[-2:] == [
        "hparams.leer: is not a key of hparams; did you mean hparams.lr?",
        "GBS: is neither a group nor a key; write hparams.global_batch_size=64",
    ]
    assert len(lines) == len(LINES) + 3
    for line, expected in zip(lines[1:-2], LINES, strict=True):
        assert line.startswith(expected)


def test_errors_in_user_options_name_their_files(refusal):
    own = "# @package _global_\ndefaults: [{override /optimizer: adamw_torch}]\nhparams: {bf16: true}\n"
    data = "defaults: [text, _self_]\ntextfield: x\n"
    words = ["--config-dir", "own", "experiment=mine", "data=mine"]
    assert refusal(*words, experiment_in_mine=own, data_in_mine=data) == [
        "own/experiment/mine.yaml: optimizer: has no option 'adamw_torch'; write optimizer=adamw "
        "(options: adam, adamw, muon, nemo_adam, nemo_adamw, sgd)",
        "own/data/mine.yaml: data.textfield: is not a key of data; did you mean data.text_field?",
        "own/experiment/mine.yaml: hparams.bf16: is not a key of hparams; write precision=amp_bf16 (weights stay in "
        "fp32)",
        "data.path: has no value (file, folder or glob of text, JSONL, Parquet, Arrow or CSV files, or a list of "
        "these); give it as data.path=...",
    ]


@pytest.mark.long
def test_choice_replaced_on_the_command_line_is_not_reported(refusal):
    text = "defaults: [config, {override /scheduler: WSD}, _self_]\nhparams: {seed: x}\n"
    words = ["--config-dir", "own", "--config-name", "own", "scheduler=wsd"]
    assert refusal(*words, "scheduler.min_lr=3", own=text) == [
        "own/own.yaml: hparams.seed: is x but must be a whole number",
        "scheduler.min_lr: is 3 but hparams.lr is only 0.004; lower it",
    ]


def test_unknown_option_in_a_defaults_list_is_reported_with_its_file(refusal):
    experiment = """# @package _global_
defaults: [/objetive: next_token, override /optimiser: adamw, override /scheduler: wsdd]
hparams: {seed: x}
"""
    data = "defaults: [txt, _self_]\npath: x\n"
    hparams = "defaults: [/schema/hparams/Hparam@_here_, /nothing@_here_]\nlr: y\n"
    words = ["--config-dir", "own", "experiment=mine", "data=mine", "hparams=mine", "data.path=y"]
    words.append("tracking.log_every_n_steps=z")
    lines = refusal(*words, experiment_in_mine=experiment, data_in_mine=data, hparams_in_mine=hparams)
    for line in (
        "own/experiment/mine.yaml: objetive: is neither a group nor a key; did you mean objective?",
        "own/experiment/mine.yaml: optimiser: is neither a group nor a key; did you mean optimizer?",
        "own/experiment/mine.yaml: scheduler: has no option 'wsdd'; did you mean wsd?",
        "own/experiment/mine.yaml: hparams.seed: is x but must be a whole number",
        "own/data/mine.yaml: data: has no option 'txt'; did you mean text?",
        "own/hparams/mine.yaml: schema/hparams: has no option 'Hparam'; did you mean HParams?",
        "own/hparams/mine.yaml: defaults: has no option 'nothing'",
        "own/hparams/mine.yaml: hparams.lr: is y but must be a number",
        "tracking.log_every_n_steps: is z but must be a whole number",
    ):
        assert sum(found.startswith(line) for found in lines) == 1, "\n".join(lines)
    assert len(lines) == 9, "\n".join(lines)


def without_libyaml(line):
    """Replace the wording of libyaml, which OmegaConf 2.4 uses to read files, by that of PyYAML."""
    return line.replace("did not find expected", "expected")


def test_all_invalid_yaml_files_are_reported_together(refusal):
    words = ["--config-dir", "own", "experiment=mine", "data=mine", "optimizer=adamx", "hparams=mine"]
    hparams = "defaults: [/schema/hparams/Hparam@_here_]\n"
    files = {"experiment_in_mine": "hparams: [1\n", "data_in_mine": "{path: x\n", "hparams_in_mine": hparams}
    lines = [without_libyaml(line) for line in refusal(*words, **files)]
    for line in (
        "optimizer: has no option 'adamx'; did you mean adam?",
        "own/experiment/mine.yaml: is not valid YAML: line 2: expected ',' or ']'",
        "own/data/mine.yaml: is not valid YAML: line 2: expected ',' or '}'",
        "own/hparams/mine.yaml: schema/hparams: has no option 'Hparam'; did you mean HParams?",
    ):
        assert sum(found.startswith(line) for found in lines) == 1, "\n".join(lines)
    assert len(lines) == 4, "\n".join(lines)


def test_invalid_primary_yaml_is_reported_with_its_line(refusal):
    (line,) = refusal("--config-dir", "own", "--config-name", "broken", broken="defaults: [config]\nhparams: [1\n")
    assert without_libyaml(line).startswith("own/broken.yaml: is not valid YAML: line 3: expected ',' or ']'")


@pytest.mark.long
def test_relative_config_path_is_resolved_from_the_current_folder(run_command):
    (run_command.cwd / "own").mkdir()
    (run_command.cwd / "own" / "mine.yaml").write_text("defaults: [config, _self_]\nhparams: {seed: 17}\n")
    for words in (["--config-path", "own"], ["--config-path=./own"], ["-cp", "own"]):
        stdout, _ = run_command(*words, "--config-name", "mine", "--cfg", "job", "--package", "hparams")
        assert "seed: 17" in stdout


@pytest.mark.parametrize("flag", ["--config-path", "--config-dir"])
def test_missing_config_folder_is_reported(flag, refusal):
    assert refusal("hparams.seed=1", f"{flag}=missing") == [
        f"{flag}: is missing, which is not an existing folder; give the folder with your options"
    ]


@pytest.mark.long
def test_sweep_reports_the_same_file_errors(refusal):
    words = ["-m", "--config-dir", "own", "--config-name", "wrong", "hparams.seed=1,2"]
    assert [line for line in refusal(*words, wrong=WRONG) if "hparams.wd" in line] == [LINES[3]]
