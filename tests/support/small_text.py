"""A run of a few seconds on a few kilobytes of text."""

SMALL = [
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "model.num_layers=1",
    "model.num_heads=2",
    "model.num_kv_heads=2",
]
"""A checkpoint of this model takes about 180 kB."""
RUN = [
    "data=text",
    "data.seq_len=16",
    "data.vocab_size=300",
    "tracking=none",
    "tracking.log_every_n_steps=1",
    "evaluation.max_samples=8",
    "evaluation.write_samples=false",
    "hparams.global_batch_size=4",
    "hparams.per_gpu_batch_size=2",
    "precision=fp32",
    "checkpoint.interval=10",
    "checkpoint.keep_last=9",
]


def write_text(folder):
    """Write a text file into a folder and return the override that trains on it."""
    path = folder / "text.txt"
    path.write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(2000)))
    return f"data.path={path}"
