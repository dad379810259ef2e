"""How soon an error is said: seconds until `python -m foundry` has refused a wrong configuration.

Each command is started anew several times in an empty folder; the medians are printed, with how many errors the
answer names. It must exit with 2 and leave no file behind.

    python benchmarks/validate.py [--repeats 5]
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MISTAKES = {
    "a misspelt key": ["hparams.leer=1e-3"],
    "a value out of bounds": ["hparams.lr=-1"],
    "batch sizes that do not divide": ["hparams.per_gpu_batch_size=7"],
    "four errors at once": ["hparams.leer=1", "scheduler=wds", "hparams.per_gpu_batch_size=7", "precision.mode=fp8"],
    **{f"one of {jobs} jobs of a sweep": ["-m", f"hparams.seed=range(-1,{jobs - 1})"] for jobs in (1, 10, 100, 500)},
}


def refuse(words: list[str], folder: Path) -> tuple[float, int]:
    """Seconds until the command has ended, and the lines it says."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "foundry", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    assert done.returncode == 2, done.stderr
    assert not any(folder.iterdir()), "a refused run leaves nothing behind"
    return seconds, len(done.stderr.splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"median of {repeats}, {os.cpu_count()} cores, Python {platform.python_version()}, {platform.machine()}\n")
    print("| error | words | seconds | lines |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for name, words in MISTAKES.items():
            answers = [refuse(words, Path(folder)) for _ in range(repeats)]
            seconds, lines = statistics.median(answer[0] for answer in answers), answers[0][1]
            print(f"| {name} | `{' '.join(words)}` | {seconds:.2f} | {lines} |")


if __name__ == "__main__":
    main()
