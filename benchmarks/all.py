"""Run benchmarks that need no GPU, one after the other, then write the pages: `python benchmarks/all.py`.

    python benchmarks/all.py [NAME ...] [--minutes 35] [--smoke] [--list]

Use an idle machine, since other processes change all figures. Benchmarks that do not fit into the remaining minutes are
skipped. The last lines name skipped and failed benchmarks, whose earlier records stay. With `--smoke` all benchmarks
run at tiny sizes, write into a temporary folder, and change no page.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Benchmark:
    """A benchmark script.

    Attributes:
        script: name of the script without `.py`.
        minutes: approximate duration on two idle cores.
        words: command-line arguments.
        threads: OMP_NUM_THREADS; None leaves it unset.
    """

    script: str
    minutes: float
    words: tuple[str, ...] = ()
    threads: int | None = None

    def command(self) -> list[str]:
        """Return the command to start."""
        return [sys.executable, str(HERE / f"{self.script}.py"), *self.words]


SIDES = ("--sides", "raw", "hf", "lightning", "accelerate", "foundry")
BENCHMARKS = (
    Benchmark("step_overhead", 0.5, threads=1),
    Benchmark("attention", 0.5, threads=1),
    Benchmark("startup", 4.0, ("--repeats", "3")),
    Benchmark("validate", 1.5, ("--repeats", "3")),
    Benchmark("checkpoint", 1.0, threads=1),
    Benchmark("packing", 3.0, threads=1),
    Benchmark("sync_policy", 3.0, threads=1),
    Benchmark("startup_scale", 3.0, threads=1),
    Benchmark("successive_halving", 6.0),
    Benchmark("memory", 6.0, ("--steps", "2", "--rounds", "2", *SIDES)),
    Benchmark("throughput", 10.0, ("--cases", "fp32-8k", "bf16-8k", "--steps", "6", *SIDES)),
    Benchmark("scaling_prediction", 20.0),
    Benchmark("width_transfer", 30.0, ("--jobs", "2"), threads=1),
)


def run(benchmark: Benchmark, more: list[str]) -> bool:
    """Run a benchmark with its output on the terminal; return True if it succeeded."""
    environment = {"OMP_NUM_THREADS": str(benchmark.threads)} if benchmark.threads else {}
    begin = time.monotonic()
    print(f"=== {benchmark.script}", flush=True)
    code = subprocess.run([*benchmark.command(), *more], env={**os.environ, **environment}, check=False).returncode
    print(
        f"=== {benchmark.script}: {time.monotonic() - begin:.0f} s{f', exit code {code}' if code else ''}\n", flush=True
    )
    return code == 0


def main() -> int:
    """Run the selected benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [benchmark.script for benchmark in BENCHMARKS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--minutes", type=float, default=35.0, help="start nothing that would end later")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: whether they work")
    parser.add_argument("--list", action="store_true", help="print the benchmarks that would run, with their minutes")
    options = parser.parse_args()
    if unknown := set(options.names) - set(names):
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    benchmarks = [benchmark for benchmark in BENCHMARKS if benchmark.script in (options.names or names)]
    if options.list:
        for benchmark in benchmarks:
            print(f"{benchmark.script:15s} about {benchmark.minutes:4.1f} minutes")
        return 0
    end, left_out, failed = time.monotonic() + 60 * options.minutes, list[str](), list[str]()
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in benchmarks:
            if not options.smoke and time.monotonic() + 60 * benchmark.minutes > end:
                left_out.append(benchmark.script)
                continue
            more = ["--smoke", "--out", str(Path(folder, f"{benchmark.script}.json"))] if options.smoke else []
            if not run(benchmark, more):
                failed.append(benchmark.script)
    if not options.smoke:
        subprocess.run([sys.executable, str(HERE / "page.py")], check=True)
    for reason, scripts in (("left out for want of time", left_out), ("failed", failed)):
        if scripts:
            print(f"{reason}: {', '.join(scripts)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
