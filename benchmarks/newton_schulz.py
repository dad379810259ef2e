"""Cost of Muon's Newton-Schulz iteration: its share of a step of the default language model, in fp32 and in bf16.

Steps of all settings alternate in one process, on the same random tokens. The output has medians over steps.

    OMP_NUM_THREADS=1 python benchmarks/newton_schulz.py [--steps 15]
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import torch
from hydra import compose, initialize_config_dir
from records import Column, Row, finish, parser
from torch import Tensor

from foundry.config.build import build
from foundry.config.composition.compose import CONFIG_NAME, config_dir, install
from foundry.config.composition.hydra_versions import VERSION_BASE
from foundry.config.schemas.root import to_config
from foundry.core.protocols import Window
from foundry.optim import muon
from foundry.parallel.precision import PrecisionPolicy
from foundry.parallel.process_group import World, arrange
from foundry.parallel.wrap import parallelize
from foundry.parts.model import build_model
from foundry.parts.optimization import build_optimizers
from foundry.training.step import TrainStep

WARMUP = 2
COLUMNS = [
    Column(key="step", heading="step, ms", spread=True),
    Column(key="iterations", heading="iterations, ms", spread=True),
    Column(key="share", heading="share", format=".1%"),
]


@dataclass
class Setting:
    """Precision of model and iteration, with the seconds of its steps and of the iterations in them."""

    precision: str
    ns_dtype: str
    steps: list[float] = field(default_factory=list)
    iterations: list[float] = field(default_factory=list)

    def build(self) -> Callable[[], None]:
        """Return a function that takes one step and records its time."""
        with initialize_config_dir(config_dir(), **VERSION_BASE):
            words = [f"precision={self.precision}", f"optimizer.ns_dtype={self.ns_dtype}"]
            config = to_config(compose(CONFIG_NAME, words))
        world, hparams = World.single(torch.device("cpu")), config.hparams
        policy = PrecisionPolicy.from_config(config.precision, world.device)
        parallel = parallelize(
            build_model(config),
            policy,
            arrange(world, config.distributed),
            grad_checkpointing=False,
            torchcompile=False,
        )
        step = TrainStep(
            model=parallel.model,
            objective=build(config.objective),
            optimizers=build_optimizers(config, parallel.model),
            sync=parallel.sync,
            precision=policy,
            world=world,
            max_grad_norm=hparams.grad_clip_norm,
        )
        shape = hparams.per_gpu_batch_size, config.data.seq_len + 1
        tokens = [torch.randint(config.model.vocab_size, shape) for _ in range(hparams.accum_freq)]
        position = torch.arange(hparams.per_gpu_batch_size)
        microbatches = [{"tokens": t[:, :-1], "targets": t[:, 1:], "position": position} for t in tokens]
        window = Window(microbatches, hparams.global_batch_size)

        def run() -> None:
            elapsed = 0.0

            def timed(matrix: Tensor, num_steps: int, dtype: torch.dtype) -> Tensor:
                nonlocal elapsed
                start = time.perf_counter()
                result = orthogonalise(matrix, num_steps, dtype)
                elapsed += time.perf_counter() - start
                return result

            muon.orthogonalise = timed
            start = time.perf_counter()
            step(window, hparams.lr, 1)
            self.steps.append(time.perf_counter() - start)
            self.iterations.append(elapsed)

        return run


orthogonalise = muon.orthogonalise


def main() -> None:
    cli = parser(__doc__)
    cli.add_argument("--steps", type=int, default=15)
    options = cli.parse_args()
    install()
    torch.manual_seed(0)
    settings = [Setting(*choice) for choice in product(("amp_bfloat16", "fp32"), ("bf16", "fp32"))]
    runs = [setting.build() for setting in settings]
    for _ in range(1 if options.smoke else options.steps + WARMUP):
        for run in runs:
            run()
    rows = list[Row]()
    for setting in settings:
        first = 0 if options.smoke else WARMUP
        steps, iterations = setting.steps[first:], setting.iterations[first:]
        values = {
            "step": [1e3 * seconds for seconds in steps],
            "iterations": [1e3 * seconds for seconds in iterations],
            "share": [part / step for part, step in zip(iterations, steps, strict=True)],
        }
        rows.append(Row(case=f"`{setting.precision}`", side=setting.ns_dtype, values=values))
    finish(options, case="`precision`", side="`optimizer.ns_dtype`", columns=COLUMNS, rows=rows)


if __name__ == "__main__":
    main()
