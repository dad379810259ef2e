"""What is installed is what is here."""

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def packages_in_tree():
    """Importable names of the folders with code, and of those with YAML, which are installed below foundry."""
    code = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "foundry").rglob("__init__.py")}
    folders = [ROOT / "conf", *(path for path in (ROOT / "conf").rglob("*") if path.is_dir())]
    yaml = {".".join(("foundry", *folder.relative_to(ROOT).parts)) for folder in folders if folder.name != "local"}
    return code | yaml


def test_the_package_list_is_the_tree():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_in_tree()


def test_every_folder_with_code_is_a_package():
    folders = {path.parent for path in (ROOT / "foundry").rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    # A copy: building writes into the folder it builds.
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if files.returncode != 0:
        pytest.skip("not a checkout")
    for name in files.stdout.splitlines():
        if (ROOT / name).is_file() and name.split("/")[0] in ("foundry", "conf", *_TOP):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.glob("*.whl")
    return built


_TOP = ("pyproject.toml", "setup.cfg", "README.md", "LICENSE")


@pytest.mark.long
def test_the_wheel_holds_every_module_and_every_yaml(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "foundry").rglob("*.py")}
    yaml = {
        f"foundry/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml") if path.parent.name != "local"
    }
    assert code | yaml | {"foundry/py.typed"} <= held
    top = {name.split("/")[0] for name in held}
    assert {name for name in top if not name.endswith(".dist-info")} == {"foundry"}


@pytest.mark.long
def test_an_unpacked_wheel_composes_elsewhere(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    overrides = ["-m", "foundry", "--cfg", "job", "--resolve", "hparams=diffusion", "scheduler=wsd"]
    done = subprocess.run(
        [sys.executable, *overrides], cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "_target_: foundry.models.dit.DiT" in done.stdout
    assert "_target_: foundry.optim.schedules.WSD" in done.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import foundry.config.compose as c; print(c.__file__, c.config_dir())"],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert all(path.startswith(str(site)) for path in where), where
    assert list(elsewhere.iterdir()) == []
