"""`python -m foundry.export run=DIR out=DIR`: one folder of safetensors that transformers loads, where it can."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.config.command import check_writable, command, folder_option
from foundry.config.errors import ConfigError, Violation
from foundry.config.setting import setting

if TYPE_CHECKING:
    from foundry.config.schemas.peft import LoRA
    from foundry.data.splits import DataSplits
    from foundry.restore import Restored


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The command's options."""

    run: str = setting("???", "run directory")
    out: str = setting("???", "folder to write: new, or empty")
    which: str = setting("last", "last, best, or the number of a step")
    trust: bool = setting(False, "build parts that config.yaml names and foundry does not know: they run their code")
    ema: bool = setting(True, "take the averaged weights where the run kept them")
    merge: bool | None = setting(
        None, "of a run with peft=lora write the whole model and not the adapters alone; null: the run's peft.merge"
    )


def export(options: ExportOptions) -> Path:
    """Write model.safetensors and, for a language model, transformers' config and tokenizer; return the folder.

    Of a run of adapters write a folder of peft's instead, or with `merge` the model that they are with their base.

    Raises:
        ConfigError: there is no such run or checkpoint, `out` holds files, or there are no adapters to be merged.
    """
    out = folder_option("out", options.out)
    check_writable("out", out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(Violation("out", f"is {out}, which exists and is not an empty folder; choose another"))
    from safetensors.torch import save_file

    from foundry.config.frozen import save_config
    from foundry.config.schemas.peft import LoRA
    from foundry.models.lora import merge_adapters
    from foundry.restore import restore
    from foundry.training.model_hooks import hook

    restored = restore(folder_option("run", options.run), options.which, ema=options.ema, trust=options.trust)
    model, peft = restored.model, restored.config.peft
    if options.merge is not None and not isinstance(peft, LoRA):
        raise ConfigError(Violation("merge", f"is {options.merge} but {options.run} has no adapters; leave it out"))
    if isinstance(peft, LoRA):
        if not (peft.merge if options.merge is None else options.merge):
            _save_adapters(restored, peft, out)
            sys.stdout.write(f"{out}\n")
            return out
        merge_adapters(model)
    state = {name: tensor.contiguous().cpu() for name, tensor in model.state_dict().items()}
    if (export_state := hook(model, "export_state")) is not None:
        state = export_state(state)
    out.mkdir(parents=True, exist_ok=True)
    save_file(state, out / "model.safetensors", metadata={"format": "pt"})
    save_config(restored.config, out)
    if (hf_config := hook(model, "hf_config")) is not None:
        _save_for_transformers(hf_config(), restored.data, out)
    sys.stdout.write(f"{out}\n")
    return out


def _save_adapters(restored: "Restored", peft: "LoRA", out: Path) -> None:
    """Write adapters as peft does, for the layers of what an export of the base is, and the tokenizer."""
    from peft import LoraConfig
    from safetensors.torch import save_file

    from foundry.config.frozen import save_config
    from foundry.models.lora import adapted_layers
    from foundry.training.model_hooks import hook

    model, state, targets = restored.model, dict[str, Any](), list[str]()
    export_state = hook(model, "export_state") or (lambda named: named)
    hf_config = hook(model, "hf_config")
    layers = adapted_layers(model)
    for own_name, layer in layers.items():
        (name,) = export_state({f"{own_name}.weight": layer.base_layer.weight})
        targets.append(name.removesuffix(".weight"))
        for part in ("lora_A", "lora_B"):
            weight = getattr(layer, part).default.weight
            state[f"base_model.model.{targets[-1]}.{part}.weight"] = weight.detach().contiguous().cpu()
    out.mkdir(parents=True, exist_ok=True)
    save_file(state, out / "adapter_model.safetensors", metadata={"format": "pt"})
    base = restored.base_path
    LoraConfig(
        base_model_name_or_path=None if base is None or not (base / "config.json").is_file() else str(base),
        task_type=None if hf_config is None else "CAUSAL_LM",
        r=peft.adapter_dim,
        lora_alpha=int(peft.alpha) if peft.alpha.is_integer() else peft.alpha,  # type: ignore[arg-type]
        lora_dropout=peft.adapter_dropout or 0.0,
        use_rslora=peft.rslora,
        target_modules=targets,
        fan_in_fan_out=any(layer.fan_in_fan_out for layer in layers.values()),
        inference_mode=True,
    ).save_pretrained(str(out))
    save_config(restored.config, out)
    if hf_config is not None:
        _save_for_transformers(hf_config(), restored.data, out, with_model=False)


def _save_for_transformers(config: Any, data: "DataSplits", out: Path, *, with_model: bool = True) -> None:
    """Write transformers' config, and with a tokenizer what makes its `generate()` stop and its chats those of the run.

    The first stop token is the end of a sequence; it pads, and starts a text without a prompt, where the folder that
    the model came from names no other tokens for that.
    """
    from transformers import GenerationConfig, PreTrainedTokenizerFast

    if data.tokenizer is None or not data.stop_ids:
        if with_model:
            config.save_pretrained(out)
        if data.tokenizer is not None:
            PreTrainedTokenizerFast(tokenizer_object=data.tokenizer).save_pretrained(out)  # type: ignore[no-untyped-call]
        return
    end = data.stop_ids[0]
    config.bos_token_id = first = _known(data.bos_id, config.bos_token_id, end)
    config.pad_token_id = pad = _known(config.pad_token_id, end)
    config.eos_token_id = end if len(data.stop_ids) == 1 else list(data.stop_ids)
    if with_model:
        config.save_pretrained(out)
        ids = {"bos_token_id": first, "eos_token_id": config.eos_token_id, "pad_token_id": pad}
        GenerationConfig(**ids).save_pretrained(out)  # type: ignore[no-untyped-call]
    named = {"bos_token": first, "eos_token": end, "pad_token": pad}
    tokens = {name: data.tokenizer.id_to_token(token) for name, token in named.items()}
    # Templates say what the first token is; the tokenizer adds none that the run has not seen.
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=data.tokenizer, chat_template=data.chat_template, clean_up_tokenization_spaces=False, **tokens
    )
    tokenizer.save_pretrained(out)


def _known(*ids: int | None) -> int:
    return next(id for id in ids if id is not None)


if __name__ == "__main__":
    command(ExportOptions, export, name="foundry.export", doc=__doc__.split(": ", 1)[1])
