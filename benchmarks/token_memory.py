"""Peak memory of tokenizing a corpus, by its size.

    python benchmarks/token_memory.py 25 100 [2000]

Each size, in MB, is a JSONL file of random words, tokenized in its own process into an empty cache: a tokenizer is
trained, documents are held out, and both splits are encoded. The table has the peak resident memory above that of the
imports, and the seconds.
"""

import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import accumulate
from pathlib import Path

from records import Column, Row, finish, parser

COLUMNS = [
    Column(key="tokens", heading="training tokens"),
    Column(key="peak_mib", heading="peak MiB above imports"),
    Column(key="seconds", heading="s"),
]
NUM_WORDS, DOCUMENT_WORDS = 20_000, 300


def write_corpus(file: Path, num_bytes: int) -> None:
    """Write documents of words, some of them frequent, as JSONL."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlucmfwypvbgkjqxz", k=draw.randint(2, 9))) for _ in range(NUM_WORDS)]
    written, shares = 0, list(accumulate(1 / (rank + 10) for rank in range(NUM_WORDS)))
    with file.open("w") as stream:
        while written < num_bytes:
            for _ in range(200):
                text = " ".join(draw.choices(words, cum_weights=shares, k=DOCUMENT_WORDS))
                written += stream.write(json.dumps({"text": text}) + "\n")


def measure(file: str, cache: str) -> None:
    """Tokenize a file in this process, and print the measurements as JSON."""
    from foundry.data.corpora.text import text_files

    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    splits = text_files(seed=0, path=file, seq_len=512, vocab_size=4096, tokenizer=None, held_out=0.05, cache_dir=cache)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = {"peak_mib": (after - before) / 1024, "seconds": time.perf_counter() - start}
    sys.stdout.write(json.dumps({**values, "tokens": (splits.notes or {})["train_tokens"]}) + "\n")


def main() -> None:
    """Measure each size and write a row for it."""
    cli = parser(__doc__)
    cli.add_argument("sizes", nargs="*", type=int, default=[10, 40], metavar="MB")
    cli.add_argument("--measure", nargs=2, metavar=("FILE", "CACHE"), help="the process that is measured")
    options = cli.parse_args()
    if options.measure:
        measure(*options.measure)
        return
    rows = list[Row]()
    for size in [1] if options.smoke else options.sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_corpus(Path(folder, "corpus.jsonl"), size * 10**6)
            command = [sys.executable, __file__, "--measure", str(Path(folder, "corpus.jsonl")), str(Path(folder, "c"))]
            values = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
        rows.append(Row(side=str(size), values={key: [value] for key, value in values.items()}))
    finish(options, side="MB", columns=COLUMNS, rows=rows)


if __name__ == "__main__":
    main()
