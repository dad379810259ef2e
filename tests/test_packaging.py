"""The wheel contains the whole package; pip commands and conflict warnings match the metadata."""

import configparser
import os
import re
import subprocess
import sys
import zipfile
from importlib import import_module
from pathlib import Path

import pytest
from support.tiny import TINY_LM

from foundry import compose, run
from foundry.config.packages import DISTRIBUTION, conflict_message, missing_message, pip_command
from foundry.config.schemas.tracking import EXTRAS

ROOT = Path(__file__).resolve().parent.parent


def packages_in_tree():
    """Return the package names of all folders with code, and of the conf folders, which are installed below foundry."""
    code = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "foundry").rglob("__init__.py")}
    folders = [ROOT / "conf", *(path for path in (ROOT / "conf").rglob("*") if path.is_dir())]
    yaml = {".".join(("foundry", *folder.relative_to(ROOT).parts)) for folder in folders if folder.name != "local"}
    return code | yaml


def test_package_list_of_setup_cfg_matches_the_tree():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    listed = setup["options"]["packages"].split()
    assert len(listed) == len(set(listed))
    assert set(listed) == packages_in_tree()


def test_every_folder_with_code_has_an_init_file():
    folders = {path.parent for path in (ROOT / "foundry").rglob("*.py")}
    assert all((folder / "__init__.py").is_file() for folder in folders)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    source = out / "source"
    source.mkdir()
    # Build in a copy, because the build writes into its source folder.
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
    (built,) = out.glob("hydra_foundry-*.whl")
    return built


_TOP = ("pyproject.toml", "setup.cfg", "README.md", "LICENSE")


@pytest.mark.long
def test_wheel_contains_every_module_and_option_file(wheel):
    held = set(zipfile.ZipFile(wheel).namelist())
    code = {str(path.relative_to(ROOT)) for path in (ROOT / "foundry").rglob("*.py")}
    yaml = {
        f"foundry/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml") if path.parent.name != "local"
    }
    templates = {str(path.relative_to(ROOT)) for path in (ROOT / "foundry").rglob("*.template")}
    assert templates
    assert code | yaml | templates | {"foundry/py.typed"} <= held
    top = {name.split("/")[0] for name in held}
    assert {name for name in top if not name.endswith(".dist-info")} == {"foundry"}


@pytest.mark.long
def test_unpacked_wheel_composes_outside_the_checkout(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    zipfile.ZipFile(wheel).extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    overrides = ["-m", "foundry", "--cfg", "job", "--resolve", "hparams=diffusion", "scheduler=wsd"]
    done = subprocess.run(
        [sys.executable, *overrides], cwd=elsewhere, env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "_target_: foundry.DiT" in done.stdout
    assert "_target_: foundry.schedules.WSD" in done.stdout
    where = subprocess.run(
        [sys.executable, "-c", "import foundry.config.composition.compose as c; print(c.__file__, c.config_dir())"],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert all(path.startswith(str(site)) for path in where), where
    hint = subprocess.run(
        [sys.executable, "-c", "from foundry.config.packages import *; print(pip_command('optuna', 'search'))"],
        cwd=elsewhere,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert hint == "pip install 'optuna>=4,<6'\n"
    assert list(elsewhere.iterdir()) == []


SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg")
OLD, NEW = "foundry", DISTRIBUTION
OWN_SCRIPT = "foundry = foundry.commands.main:main"


def install(
    site, name, *, script=OWN_SCRIPT, record="foundry/commands/main.py,,\n", version="0.1.0", suffix="dist-info"
):
    """Write the metadata of an installed distribution, with the requirements of setup.cfg."""
    lines = [f"Requires-Dist: {line}" for line in SETUP["options"]["install_requires"].split()]
    for extra, packages in SETUP["options.extras_require"].items():
        of_extra = [line for line in packages.splitlines() if line and not line.startswith("#")]
        lines += [f'Requires-Dist: {line}; extra == "{extra.replace("_", "-")}"' for line in of_extra]
    folder = site / f"{name.replace('-', '_')}-{version}.{suffix}"
    folder.mkdir(parents=True)
    text = "\n".join(["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", *lines, ""])
    (folder / ("METADATA" if suffix == "dist-info" else "PKG-INFO")).write_text(text)
    (folder / "entry_points.txt").write_text(f"[console_scripts]\n{script}\n")
    if record is not None:
        (folder / "RECORD").write_text(record)


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Path of a site folder, not yet created, that is the only entry of sys.path."""
    import_module("packaging.requirements")  # import it while sys.path still has its folder
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    return tmp_path / "site"


def test_distribution_is_hydra_foundry_and_its_command_is_foundry():
    assert SETUP["metadata"]["name"] == DISTRIBUTION == "hydra-foundry"
    assert SETUP["options.entry_points"]["console_scripts"].split("\n")[1:] == [OWN_SCRIPT]


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("optuna", "search", "pip install 'optuna>=4,<6'"),
        ("lm_eval", "lm_eval", "pip install 'lm_eval>=0.4.13'"),
        ("mujoco", "robot", "pip install 'mujoco>=3.3' 'gymnasium>=1.0'"),
        (
            "gymnasium_robotics",
            "fetch",
            "pip install 'mujoco>=3.3,<3.12' 'gymnasium>=1.0' 'gymnasium-robotics>=1.4.2'",
        ),
        ("metaworld", "metaworld", "pip install 'metaworld>=3.1.1' packaging"),
    ],
)
def test_hint_installs_what_the_metadata_requires(site, package, extra, command):
    install(site, NEW)
    assert missing_message(package, extra) == f"needs {package}, which is not installed; {command}"


def test_hint_without_metadata_names_the_package(site):
    assert pip_command("optuna", "search") == "pip install optuna"
    assert pip_command("mujoco<3.12", "fetch") == "pip install 'mujoco<3.12'"


def test_every_hint_names_an_extra_of_setup_cfg():
    calls = re.findall(r"(?:missing_message|missing_package|pip_command|need)\(\s*[^()]*?, [\"'](\w+)[\"']\)", _code())
    assert len(calls) >= 10
    assert set(calls) <= set(SETUP["options.extras_require"])
    assert set(EXTRAS.values()) <= set(SETUP["options.extras_require"])


def test_installation_page_lists_every_extra():
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[^|]+) \|", page.partition("## Extras")[2].partition("\n## ")[0], re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(SETUP["options.extras_require"])


def test_early_build_beside_this_version_is_a_conflict(site):
    install(site, OLD)
    assert conflict_message() is None  # an editable build of 0.1 in a checkout of this version is fine
    install(site, NEW, version="0.2.0")
    assert conflict_message() == (
        "foundry 0.1.0 and hydra-foundry 0.2.0 are installed in the same folder. Uninstall both, then install "
        "hydra-foundry again (uninstalling foundry alone deletes files of hydra-foundry)."
    )


@pytest.mark.parametrize(
    "old",
    [
        {"script": "foundry = foundry.main:run"},
        {"script": "other = other:main"},
        {"record": None, "suffix": "egg-info"},
    ],
)
def test_foreign_package_or_stale_egg_info_is_no_conflict(site, old):
    install(site, OLD, **old)
    install(site, NEW)
    assert conflict_message() is None


def test_early_build_in_another_folder_is_no_conflict(site, tmp_path, monkeypatch):
    install(site, NEW)
    install(tmp_path / "system", OLD)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "system")])
    assert conflict_message() is None


def test_version_and_first_line_of_a_run_report_the_conflict(tmp_path, monkeypatch, caplog):
    site = tmp_path / "site"
    install(site, OLD)
    install(site, NEW)
    command = [sys.executable, "-m", "foundry", "--version"]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    monkeypatch.syspath_prepend(site)
    warning = conflict_message()
    assert done.stdout.splitlines()[1:] == [warning]
    run(compose([*TINY_LM, "hparams.max_steps=1"]), tmp_path / "run")
    assert caplog.messages[0] == warning
    assert warning in (tmp_path / "run" / "foundry.log").read_text().splitlines()[0]


def _code():
    return "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "foundry").rglob("*.py"))


TEXTS = ("foundry", "docs", "conf", "benchmarks", ".github", ".ci")
TEXT_SUFFIXES = {".py", ".pyi", ".md", ".ipynb", ".yaml", ".yml", ".txt", ".cfg", ".toml", ""}
PIP_COMMAND = re.compile(r"\b(?:pipx?3?|uv)\s+(?:tool\s+|pip\s+)?(?:install|add|uninstall|show|download)\b[^`|&;#\n]*")


def texts():
    """Yield path and text of every source file, page, notebook and option file outside `tests`."""
    files = [path for path in ROOT.iterdir() if path.is_file()]
    for folder in TEXTS:
        files += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    for path in files:
        if path.suffix in TEXT_SUFFIXES and path.name != "LICENSE" and not path.name.startswith(".git"):
            yield path, path.read_text(encoding="utf-8", errors="ignore")


def names_the_distribution(text):
    """Return the pip commands in a text that name foundry as a package, and extras such as `foundry[search]`."""
    joined = re.sub(r"[\"']?\s*\n[\"'\s>#]*", " ", text)  # a command or a string may span two lines
    commands = [*PIP_COMMAND.findall(text), *PIP_COMMAND.findall(joined)]
    named = [c for c in commands if re.search(r"(?<![\w/.:=-])(?:hydra[-_])?foundry(?=$|[\s'\"\[=<>~!])", c[:120])]
    return [*named, *re.findall(r"\bfoundry\[[a-z.]+", text)]


@pytest.mark.parametrize(
    "text",
    [
        "pip install foundry",
        "pip install 'foundry[search]'",
        "Needs `pip install\n'foundry'`.",
        "GPUs need foundry[gpu_metrics]",
        "uv pip install -U hydra-foundry",
        "pip uninstall foundry",
    ],
)
def test_pip_commands_in_any_form_are_detected(text):
    assert names_the_distribution(text)


def test_no_page_or_message_has_a_pip_command_for_foundry():
    wrong = {str(path.relative_to(ROOT)): found for path, text in texts() if (found := names_the_distribution(text))}
    assert wrong == {}


def test_pip_commands_of_messages_come_from_the_metadata():
    packages = ROOT / "foundry" / "config" / "packages.py"
    typed = [path for path in (ROOT / "foundry").rglob("*.py") if "pip install" in path.read_text(encoding="utf-8")]
    assert typed == [packages]
