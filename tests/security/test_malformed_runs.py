"""`sample` and `export` of malformed run directories succeed, or print error lines and exit with code 2."""

import json
import os
import shutil
import sys

import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import examples, some_of

from foundry.commands.export import ExportOptions, export
from foundry.commands.sample import SampleOptions, draw
from foundry.config.command import command

COMMANDS = {"sample": (SampleOptions, draw), "export": (ExportOptions, export)}
FILES = ("config.yaml", "plan.json", "tokenizer.json", "checkpoints", "CHECKPOINT/manifest.json")
MORE_FILES = ("CHECKPOINT", "CHECKPOINT/shard-00000.safetensors", "checkpoints/latest", "status.json")
UNREAD = ("CHECKPOINT", "status.json", "checkpoints/latest", "plan.json", "tokenizer.json")
"""Files that some runs or commands do not need; without the newest checkpoint, the previous one is used."""

HARMLESS = (("config.yaml", "flip"),)
"""Damage without effect: the flipped bit changes one letter of a name."""

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(
        [0, -1, 2**31, 2**63, 2**70, 0.5, float("nan"), float("inf"), "", "x", "???", "${nope}", "\x1b[2J"]
    ),
    st.sampled_from([[], [1], {}, {"a": 1}, [[[]]], {"_target_": "os.system"}]),
)
"""Replacement values for a setting."""


def ask(name, overrides, capsys):
    """Run a command in this process and return (exit code, stderr); assert code 0, or 2 with error lines."""
    before, sys.argv = sys.argv, [name, *overrides]
    try:
        command(*COMMANDS[name], name=name, doc="")
        code = 0
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.argv = before
    err = capsys.readouterr().err
    assert code in (0, 2), err
    if code:
        assert err.strip()
        assert "Traceback" not in err
        assert all(ord(c) >= 32 for line in err.split("\n") for c in line)
    return code, err


def newest(run_dir):
    return run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").readlink()


def spoil(path, how, amount):
    """Delete or damage a file, or replace it with a special file or with the bytes `how`."""
    if how == "delete":
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return
    content = path.read_bytes() if path.is_file() else b"folder"
    spoil(path, "delete", amount)
    if how == "truncate":
        path.write_bytes(content[: int(len(content) * amount)])
    elif how == "flip":
        at = min(int(len(content) * amount), len(content) - 1)
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << at % 8]) + content[at + 1 :])
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to("/dev/zero")
    elif how == "broken link":
        path.symlink_to("nowhere")
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "pipe":
        os.mkfifo(path)
    else:
        path.write_bytes(how)


TEXTS = (
    b"",
    b"\n",
    b"null",
    b"[]",
    b"3",
    b"text",
    b"{",
    b"\xff\xfe\x00",
    b"\0" * 100,
    b"[" * 100_000,
    b"{}",
    b"---\n---\n",
)
HOW = ("delete", "truncate", "flip", "folder", "link", "broken link", "loop", "pipe", *TEXTS)


def replaced(node, at, value):
    """Replace one value in nested containers, or delete it if `value` is Ellipsis; return the containers."""
    paths = list(leaves(node))
    *parents, last = paths[at % len(paths)]
    inner = node
    for key in parents:
        inner = inner[key]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return node


def leaves(node, path=()):
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in children:
        yield (*path, key)
        yield from leaves(value, (*path, key))


@pytest.mark.parametrize(("name", "run"), [("sample", "lm"), ("export", "dit")])
@pytest.mark.long
def test_damaged_run_files_give_error_lines(finished, tmp_path, capsys, run, name):
    tried, accepted = 0, 0
    for file in (*FILES, *MORE_FILES):
        for how in HOW:
            run_dir = shutil.copytree(finished / run, tmp_path / "run", symlinks=True)
            path = run_dir / file.replace("CHECKPOINT", str(newest(run_dir).relative_to(run_dir)))
            if os.path.lexists(path):
                spoil(path, how, 0.5)
                overrides = [
                    f"run={run_dir}",
                    f"out={tmp_path / 'out'}",
                    *(["max_new_tokens=1"] if name + run == "samplelm" else []),
                ]
                code, _ = ask(name, overrides, capsys)
                tried, accepted = tried + 1, accepted + (code == 0)
                assert code == 2 or file in UNREAD or (file, how) in HARMLESS, (
                    file,
                    how,
                )
            shutil.rmtree(run_dir)
            shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert tried >= 130
    assert accepted < tried / 2


@pytest.mark.parametrize("name", some_of(COMMANDS, "sample"))
def test_random_values_in_run_files_give_error_lines(finished, tmp_path_factory, capsys, name):
    counts = {0: 0, 2: 0}

    @settings(
        max_examples=examples(60),
        derandomize=True,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        run=st.sampled_from(["lm", "dit"]),
        file=st.sampled_from(["config.yaml", "config.yaml", "plan.json", "tokenizer.json"]),
        at=st.integers(0, 10_000),
        value=st.one_of(VALUES, st.just(...)),
    )
    def try_one(run, file, at, value):
        folder = tmp_path_factory.mktemp("spoilt")
        run_dir = shutil.copytree(finished / run, folder / "run", symlinks=True)
        if (run_dir / file).is_file():
            text = (run_dir / file).read_text()
            if file == "config.yaml":
                content = replaced(yaml.safe_load(text), at, value)
                (run_dir / file).write_text(yaml.safe_dump(content))
            else:
                (run_dir / file).write_text(json.dumps(replaced(json.loads(text), at, value)))
        overrides = ["max_new_tokens=1"] if (name, run) == ("sample", "lm") else []
        code, _ = ask(name, [f"run={run_dir}", f"out={folder / 'out'}", *overrides], capsys)
        counts[code] += 1
        shutil.rmtree(folder)

    try_one()
    assert sum(counts.values()) >= examples(60)
    assert counts[2] >= examples(15)


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    "word",
    [
        "run=nowhere", "run=", "run='${nope}'", "run='${oc.env:HOME}'", "~run", "+run=x", "++run=x", "run@a=x",
        "run=a,b", "run=glob(*)", "run=~nobody-of-this-name/x", "run=config.yaml", "run=config.yaml/x", "run=null",
        "run={a: 1}", f"run={'x' * 300}", f"run={'x/' * 3000}", "run=loop", "run=/dev/zero", "run=pipe", "which=nope",
        "which=-1", "which=99999999999", "which=''", "out=config.yaml", "out=config.yaml/x", "out=broken",
        "out=broken/x", "out=loop/x", f"out={'x' * 300}/y", "out=/dev/null/x", "out=/proc/x/y",
        "out=~nobody-of-this-name/x", "ema=3.5", "trust=maybe", "trust=null",
    ],
)  # fmt: skip
def test_invalid_run_which_and_out_options_give_a_one_line_error(lm, capsys, monkeypatch, name, word):
    monkeypatch.chdir(lm)
    (lm / "broken").symlink_to("nowhere")
    (lm / "loop").symlink_to("loop")
    os.mkfifo(lm / "pipe")
    code, err = ask(name, [f"run={lm}", *([] if name == "sample" else [f"out={lm / 'new'}"]), word], capsys)
    if name == "sample" and word in ("out=config.yaml", "out=broken"):  # sample writes to out with a suffix
        assert code == 0, err
    else:
        assert code == 2
        assert err.count("\n") == 1


@pytest.mark.parametrize("name", COMMANDS)
def test_flipped_byte_in_the_weights_is_detected_by_checksum(lm, tmp_path, capsys, name):
    shard = newest(lm) / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-5] ^= 1
    shard.write_bytes(content)
    code, err = ask(name, [f"run={lm}", f"out={tmp_path / 'out'}"], capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "shard-00000.safetensors has the checksum" in err
    assert not (tmp_path / "out").exists()


def test_full_disk_exits_with_1_rather_than_2(lm, tmp_path, capsys, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device", "x")

    monkeypatch.setattr("foundry.checkpoint.export_files.write_weights", full)
    monkeypatch.setattr(sys, "argv", ["foundry.export", f"run={lm}", f"out={tmp_path / 'out'}"])
    with pytest.raises(SystemExit) as ended:
        command(ExportOptions, export, name="foundry.export", doc="")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "foundry.export: [Errno 28] No space left on device: 'x'\n"


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["prompt=''"], "prompt"),
        (["prompt='\\${x}'"], None),
        (["max_new_tokens=0"], "max_new_tokens"),
        (["temperature=1e-30"], None),
        (["temperature=1e30"], None),
        (["seed=-1"], "seed"),
        (["seed=18446744073709551616"], "seed"),
        (["labels=[1]"], "labels"),
        (["steps=3"], "steps"),
    ],
)
def test_invalid_sampling_options_of_a_language_model_are_rejected(lm, tmp_path, capsys, overrides, key):
    code, err = ask("sample", [f"run={lm}", f"out={tmp_path / 'out'}", "max_new_tokens=2", *overrides], capsys)
    assert code == (2 if key else 0), err
    assert key is None or err.startswith(f"{key}: ")


@pytest.mark.parametrize("overrides", [["labels=[]"], ["labels=[99]"], ["labels=[-1]"], ["steps=100000"], ["prompt=x"]])
def test_invalid_sampling_options_of_a_diffusion_model_are_rejected(dit, tmp_path, capsys, overrides):
    code, err = ask("sample", [f"run={dit}", f"out={tmp_path / 'out'}", *overrides], capsys)
    assert (code, err.count("\n")) == (2, 1)


def test_sampling_from_nan_weights_is_an_error(lm, tmp_path, capsys, monkeypatch):
    def load(folder, model, **options):
        torch.nn.init.constant_(next(model.parameters()), torch.nan)

    monkeypatch.setattr("foundry.engine.restore.load_weights", load)
    code, err = ask("sample", [f"run={lm}", f"out={tmp_path / 'out'}"], capsys)
    assert (code, err.count("\n")) == (2, 1)
    assert "NaN" in err
