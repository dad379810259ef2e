"""Startup time: seconds to the help page, to the composed configuration, and to the first optimizer step.

Each command is started several times in an empty folder, in turn. The output has wall and processor seconds of the
command and its child processes, to its end or its first step. `import torch` is included for comparison, since every
run needs it. foundry runs with all defaults, including MLflow and plots, and with `tracking=none`. Other libraries
(`pip install -e '.[bench]'`) run without trackers, with random tokens, and are skipped if they are not installed. An
untimed run makes the tokenizer and the token arrays first.

    python benchmarks/startup.py [--repeats 5]
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from comparison import PEERS, installed, title
from records import Column, Headline, Row, finish, parser
from startup_peers import BATCH, HEADS, INNER, LAYERS, SEQ_LEN, VOCABULARY, WIDTH

FOUNDRY = [sys.executable, "-m", "foundry"]
COMMANDS = {
    "`python -c pass`": [sys.executable, "-c", "pass"],
    "`python -c 'import torch'`": [sys.executable, "-c", "import torch"],
    "`python -m foundry --help`": [*FOUNDRY, "--help"],
    "`python -m foundry --cfg job --resolve`": [*FOUNDRY, "--cfg", "job", "--resolve"],
    "`python -m foundry.sample --help`": [sys.executable, "-m", "foundry.sample", "--help"],
}
SIZES = [
    f"model.hidden_size={WIDTH}",
    f"model.intermediate_size={INNER}",
    f"model.num_layers={LAYERS}",
    f"model.num_heads={HEADS}",
    f"model.num_kv_heads={HEADS}",
    f"data.vocab_size={VOCABULARY}",
    f"data.seq_len={SEQ_LEN}",
    f"hparams.global_batch_size={BATCH}",
    f"hparams.per_gpu_batch_size={BATCH}",
    "optimizer=adamw",
    "tracking.log_every_n_steps=1",
    "hydra.run.dir=run",
]
WITH_ALL, WITHOUT = "foundry, MLflow and plots on", "foundry, `tracking=none`"
RUNS = {
    WITH_ALL: [*FOUNDRY, *SIZES],
    WITHOUT: [*FOUNDRY, *SIZES, "tracking=none", "tracking.log_every_n_steps=1"],
}
COLUMNS = [
    Column(key="processor", heading="processor, s", format=".2f", spread=True),
    Column(key="clock", heading="clock, s", format=".2f", spread=True),
]
_TICKS = os.sysconf("SC_CLK_TCK")

Measured = tuple[float, float]
"""Wall seconds and processor seconds."""


def measure(command: Sequence[str], folder: Path, is_done: Callable[[], bool] | None = None) -> Measured:
    """Start a command and measure until it ends or `is_done` returns True; then kill it with its child processes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    output = folder / "output"
    with output.open("wb") as file:
        begin = time.perf_counter()
        process = subprocess.Popen(
            command, cwd=folder, stdout=file, stderr=file, env=environment, start_new_session=True
        )
        try:
            while not (is_done is not None and is_done()):
                if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    break  # the process still exists, so its processor time can be read
                time.sleep(0.002)
            measured = time.perf_counter() - begin, processor_seconds(process.pid)
            if is_done is not None and not is_done():
                raise SystemExit(f"{' '.join(command)} ended before its first step:\n{output.read_text()}")
            return measured
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def processor_seconds(session: int) -> float:
    """Return the processor seconds of a session's processes and of their ended children."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += sum(int(field) for field in fields[11:15])
    return ticks / _TICKS


def measure_first_step(command: Sequence[str], folder: Path) -> Measured:
    """Measure to the first optimizer step: foundry logs it, and the script of the other libraries writes a file."""
    shutil.rmtree(folder / "run", ignore_errors=True)
    marker = folder / "run" / "metrics.jsonl"
    (folder / "run").mkdir()
    return measure(command, folder, lambda: marker.is_file() and marker.stat().st_size > 0)


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--repeats", type=int, default=5)
    cli.add_argument("--sides", nargs="*", choices=PEERS, default=list(PEERS), metavar="SIDE", help=", ".join(PEERS))
    options = cli.parse_args()
    commands, runs, repeats = COMMANDS, dict(RUNS), options.repeats
    if options.smoke:
        commands, repeats = {}, 0
        del runs[WITH_ALL]
        runs[WITHOUT] = [*runs[WITHOUT], "data=text", "data.path=text.txt", "data.vocab_size=300"]
    script = str(Path(__file__).with_name("startup_peers.py"))
    runs |= {title(side): [sys.executable, script, side, "run/metrics.jsonl"] for side in installed(options.sides)}
    seconds: dict[str, list[Measured]] = {name: [] for name in [*commands, *runs]}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "text.txt").write_text("A little text.\n" * 4000)
        os.environ["FOUNDRY_CACHE"] = str(folder / "cache")
        for number in range(repeats + 1):  # the first round compiles modules and fills caches
            for name in seconds:
                is_run = name in runs
                measured = (measure_first_step if is_run else measure)({**commands, **runs}[name], folder)
                sys.stderr.write(f"{number} {name}: {measured[1]:.2f} s of a processor, {measured[0]:.2f} s\n")
                seconds[name] += [measured] if number or not repeats else []
    rows = list[Row]()
    for name, values in seconds.items():
        clock, processor = zip(*values, strict=True)
        case = "to a first step" if name in runs else "to the end"
        rows.append(Row(case=case, side=name, values={"processor": processor, "clock": clock}))
    cells = {row.side: COLUMNS[0].cell(row.values["processor"]).partition(" ")[0] for row in rows}
    headline = Headline(
        what="Processor seconds to a first step",
        foundry=f"{cells[WITHOUT]} without trackers, {cells.get(WITH_ALL)} with MLflow and plots",
        beside=", ".join(f"{cells[title(side)]} {title(side)}" for side in PEERS if title(side) in cells)
        + ", without trackers",
    )
    finish(
        options, case="measured", side="command", columns=COLUMNS, rows=rows, chart="processor", headlines=[headline]
    )


if __name__ == "__main__":
    main()
