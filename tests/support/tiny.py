"""Overrides for tiny models without plots, so that a run consists mostly of its start."""

SMALL_LM = [
    "debug=fast",
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_layers=2",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "data.seq_len=32",
    "tracking.plots=false",
]
TINY_LM = [*SMALL_LM, "objective.sample_tokens=16"]
TINY_DIT = [
    "hparams=diffusion",
    "debug=fast",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.num_heads=2",
    "hparams.global_batch_size=16",
    "objective.sampling_steps=3",
    "objective.samples_per_class=1",
    "tracking.plots=false",
]
PLOTS = ["tracking.plots=true"]
