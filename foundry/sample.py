"""`python -m foundry.sample run=DIR`: text continuations or pictures from a checkpoint."""

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path

from foundry.config.command import check_writable, command, folder_option
from foundry.config.errors import ConfigError, Violation
from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The command's options; null means what the run's objective says."""

    run: str = setting("???", "run directory")
    which: str = setting("last", "last, best, or the number of a step")
    out: str | None = setting(None, "file to write, without suffix; null: samples in the run directory's plots/")
    ema: bool = setting(True, "use the averaged weights where the run kept them")
    trust: bool = setting(False, "build parts that config.yaml names and foundry does not know: they run their code")
    seed: int = setting(0, "seed of the drawing", ge=0, le=2**63 - 1)
    prompt: str | None = setting(None, "text to continue")
    num_tokens: int | None = setting(None, "tokens to add", ge=1)
    temperature: float | None = setting(None, "of the sampled tokens; 0 picks the likeliest", ge=0)
    labels: list[int] | None = setting(None, "classes to draw, one picture each, such as [3,1,4]")
    samples_per_class: int | None = setting(None, "pictures of each class", ge=1)
    guidance_scale: float | None = setting(None, "classifier-free guidance; 1: none", ge=0)
    steps: int | None = setting(None, "denoising steps", ge=1)


def sample(options: SampleOptions) -> Path:
    """Draw, write and return the file.

    Raises:
        ConfigError: there is no such run or checkpoint, or an option is not of this run's objective.
    """
    from foundry.restore import build_part, explained, restore
    from foundry.training.protocols import GenerativeObjective

    run_dir = folder_option("run", options.run)
    stem = folder_option("out", options.out) if options.out else run_dir / "plots" / "samples"
    check_writable("out", stem.parent)
    restored = restore(run_dir, options.which, ema=options.ema, trust=options.trust)
    objective = build_part(restored.config, "objective")
    asked = {
        name: value
        for name in ("prompt", "num_tokens", "temperature", "labels", "samples_per_class", "guidance_scale", "steps")
        if (value := getattr(options, name)) is not None
    }
    kind = type(objective).__name__
    if not isinstance(objective, GenerativeObjective):
        raise ConfigError(Violation("run", f"is {options.run}, whose objective {kind} draws nothing"))
    takes = inspect.signature(objective.generate).parameters
    if unknown := [name for name in asked if name not in takes]:
        raise ConfigError([Violation(name, f"is no option of objective {kind}") for name in unknown])
    if not all(bool(tensor.isfinite().all()) for tensor in restored.model.state_dict().values()):
        message = f"is {options.which}, whose weights are NaN or infinite; choose an earlier step"
        raise ConfigError(Violation("which", message))
    with explained(f"{run_dir} cannot be drawn from", restored.config, "model", "data", "objective"):
        drawn = objective.generate(restored.model, restored.data, restored.device, seed=options.seed, **asked)
    stem.parent.mkdir(parents=True, exist_ok=True)
    file = drawn.save(stem)
    if hasattr(drawn, "text"):
        sys.stdout.write(f"{drawn.text}\n")
    sys.stdout.write(f"{file}\n")
    return file


if __name__ == "__main__":
    command(SampleOptions, sample, name="foundry.sample", doc=__doc__.split(": ", 1)[1])
