"""Run tests with other versions that setup.cfg allows: of Python, torch, Hydra and Optuna.

Usage: `pip install nox && nox`, or `pipx run nox`. Arguments after `--` select other tests: `nox -s tests-3.13 --
tests/data`. `.ci/run` checks a change; these sessions test versions that the CI machine does not have.
"""

from pathlib import Path

import nox

PYTHONS = ("3.11", "3.12", "3.13")
OLDEST_TORCH = "2.11.0"
OPTUNA = {"oldest": "4.0.0", "newest": "4.9.0"}
HYDRA_1_4 = Path(".ci/hydra-1.4.txt")
QUICK = (
    "tests/config",
    "tests/optim",
    "tests/training",
    "tests/objectives",
    "tests/tasks/post_training",
    "tests/checkpoint",
    "tests/parity/test_raw_loop.py",
)
ALL = ("tests",)
nox.options.default_venv_backend = "venv"


def check(session: nox.Session, *versions: str, tests: tuple[str, ...] = QUICK) -> None:
    """Install foundry, train from the command line, and run the tests.

    Args:
        session: session of nox.
        versions: requirements such as `torch==2.11.0` that replace the pins in constraints.txt.
        tests: files and folders to test if the command does not name any.
    """
    pins = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    names = {version.partition("=")[0] for version in versions}
    kept = Path(session.create_tmp()) / "constraints.txt"
    kept.write_text("\n".join(pin for pin in pins if pin.partition("=")[0] not in names), encoding="utf-8")
    session.install("-c", str(kept), *versions, "-e", ".[test]")
    session.run("python", "-m", "foundry", "debug=fast", "tracking=none", f"hydra.run.dir={session.create_tmp()}/run")
    session.run("pytest", "-p", "no:cacheprovider", *(session.posargs or tests))


@nox.session(python=PYTHONS)
def tests(session: nox.Session) -> None:
    """Test with the versions in constraints.txt."""
    check(session)


@nox.session(python=PYTHONS[0])
def oldest_torch(session: nox.Session) -> None:
    """Test with the oldest torch that setup.cfg allows."""
    check(session, f"torch=={OLDEST_TORCH}")


@nox.session(python=PYTHONS[0])
def hydra_1_4(session: nox.Session) -> None:
    """Run the default tests with Hydra 1.4 and OmegaConf 2.4."""
    lines = HYDRA_1_4.read_text(encoding="utf-8").splitlines()
    check(session, *(line for line in lines if not line.startswith("#")), tests=ALL)


@nox.session(python=PYTHONS[0])
@nox.parametrize("version", OPTUNA.values(), ids=list(OPTUNA))
def optuna_4(session: nox.Session, version: str) -> None:
    """Run the default tests with the oldest and the newest Optuna 4."""
    check(session, f"optuna=={version}", tests=ALL)
