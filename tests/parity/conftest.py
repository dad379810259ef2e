from pathlib import Path

import pytest
from support import composition

pytest.register_assert_rewrite("golden_cases", "golden_checks", "golden_instead", "finetuning_checks")

LM = [
    f"hydra.searchpath=[{Path(__file__).parent / 'conf'}]",
    "data=ragged",
    "model.hidden_size=16",
    "model.intermediate_size=24",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "hparams.z_loss_coefficient=1e-3",
    "hparams.lr=3e-3",
]
DIFFUSION = ["hparams=diffusion", "hparams.lr=5e-4", "model.hidden_size=16", "model.num_layers=2", "model.num_heads=2"]
POLICY = [
    f"hydra.searchpath=[{Path(__file__).parent / 'conf'}]",
    "hparams=diffusion",
    "hparams.lr=5e-4",
    "data=windows",
    "model=policy_dit",
    "objective=diffusion_policy",
    "model.patch_size=4",
    "model.hidden_size=16",
    "model.num_layers=2",
    "model.num_heads=2",
]
VLM = [
    *LM[:1],
    "data=pictures",
    "model=vlm",
    "objective=sft",
    "model.hidden_size=16",
    "model.intermediate_size=24",
    "model.num_layers=2",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "hparams.lr=3e-3",
]
VLA = [
    *VLM[:1],
    "hparams=diffusion",
    "hparams.lr=5e-4",
    "data=windows",
    "data.image_size=16",
    "+data.instruction_tokens=6",
    "+data.vocab_size=11",
    "model=vla",
    "objective=flow_policy",
    "model.intermediate_size=24",
    *(f"model.backbone.{size}" for size in ("hidden_size=16", "intermediate_size=24", "num_layers=2")),
    *(f"model.backbone.{heads}" for heads in ("num_heads=4", "num_kv_heads=2")),
]
TASKS = {"lm": LM, "diffusion": DIFFUSION, "policy": POLICY, "vlm": VLM, "vla": VLA}
QUIET = ["tracking=none", "tracking.progress=false", "tracking.log_every_n_steps=1", "evaluation.write_samples=false"]
BATCH = ["hparams.global_batch_size=16", "hparams.per_gpu_batch_size=16", "hparams.grad_clip_norm=1.0"]


@pytest.fixture(scope="session")
def configure():
    """Return `configure("lm" | "diffusion" | "policy" | "vlm" | "vla", *overrides)`, which composes a small task."""

    def run(task, *overrides):
        words = [*TASKS[task], *QUIET, *BATCH, "optimizer=adamw", "precision=fp32", *overrides]
        return composition.configure(*words)

    return run


def pytest_terminal_summary(terminalreporter):
    import finetuning_checks
    from golden_cases import deviations

    for kind, (number, largest) in sorted(deviations.items()):
        terminalreporter.write_line(f"{kind}: {number} numbers as Megatron's, largest relative deviation {largest:g}")
    for kind, (number, largest) in sorted(finetuning_checks.deviations.items()):
        terminalreporter.write_line(f"{kind}: {number} numbers as recorded, largest deviation {largest:g}")
