import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from foundry.core.exit_codes import ExitCode, Retry, code_of_signal, codes, retry

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (0, "never"),
        (1, "useless"),
        (2, "never"),
        (74, "yes"),
        (75, "yes"),
        (137, "yes"),
        (139, "yes"),  # SIGSEGV, which is not in the table
        (130, "continues"),
        (143, "continues"),
        (-signal.SIGTERM, "continues"),  # a negative code, as subprocess reports a signal
        (-signal.SIGKILL, "yes"),
        (126, "useless"),
        (255, "useless"),
    ],
)
def test_exit_code_decides_whether_to_start_again(code, expected):
    assert retry(code) == expected


def test_codes_of_stop_signals_are_those_of_a_shell():
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        shell = subprocess.run(["sh", "-c", f"sh -c 'kill -{int(signum)} $$'; exit $?"], check=False)
        assert shell.returncode == code_of_signal(signum) == ExitCode[signum.name]
        assert retry(shell.returncode) is Retry.continues


def test_each_code_belongs_to_one_class():
    lists = [codes(kind) for kind in Retry]
    assert sorted(code for members in lists for code in members) == sorted(map(int, ExitCode))
    assert codes(Retry.never) == [0, 2]
    assert codes(Retry.yes, Retry.useless) == [1, 3, 74, 75, 137, 141]


def test_page_has_the_table_of_exit_codes():
    section = PAGE.read_text(encoding="utf-8").partition("## Exit codes\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([\d, ]+) \| (\w+) \| (.+) \|$", section, re.MULTILINE)
    written = {int(code): kind for numbers, kind, _ in rows for code in numbers.split(",")}
    assert written == {int(code): code.retry.value for code in ExitCode}


def test_table_of_exit_codes_imports_no_torch():
    program = "import sys, foundry.core.exit_codes; print('torch' in sys.modules, 'hydra' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert result.stdout.split() == ["False", "False"]
