"""`python -m foundry.export run=DIR out=DIR`: one folder of safetensors that transformers loads, where it can."""

import sys
from dataclasses import dataclass
from pathlib import Path

from foundry.config.command import check_writable, command, folder_option
from foundry.config.errors import ConfigError, Violation
from foundry.config.setting import setting


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The command's options."""

    run: str = setting("???", "run directory")
    out: str = setting("???", "folder to write: new, or empty")
    which: str = setting("last", "last, best, or the number of a step")
    trust: bool = setting(False, "build parts that config.yaml names and foundry does not know: they run their code")
    ema: bool = setting(True, "take the averaged weights where the run kept them")


def export(options: ExportOptions) -> Path:
    """Write model.safetensors and, for a language model, transformers' config and tokenizer; return the folder.

    Raises:
        ConfigError: there is no such run or checkpoint, or `out` holds files.
    """
    out = folder_option("out", options.out)
    check_writable("out", out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(Violation("out", f"is {out}, which exists and is not an empty folder; choose another"))
    from safetensors.torch import save_file

    from foundry.config.frozen import save_config
    from foundry.restore import restore
    from foundry.training.model_hooks import hook

    restored = restore(folder_option("run", options.run), options.which, ema=options.ema, trust=options.trust)
    model = restored.model
    state = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    if (export_state := hook(model, "export_state")) is not None:
        state = export_state(state)
    out.mkdir(parents=True, exist_ok=True)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    save_config(restored.config, out)
    if (hf_config := hook(model, "hf_config")) is not None:
        hf_config().save_pretrained(out)
        _save_tokenizer(restored.data.tokenizer, out)
    sys.stdout.write(f"{out}\n")
    return out


def _save_tokenizer(tokenizer: object, out: Path) -> None:
    if tokenizer is None:
        return
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(out)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    command(ExportOptions, export, name="foundry.export", doc=__doc__.split(": ", 1)[1])
