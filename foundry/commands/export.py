"""`foundry export run=DIR out=DIR`: write a folder of safetensors, which transformers can load if it has the model."""

import sys
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry.config.command import Outcome, check_output_folder, command, folder_option, print_path, run_option
from foundry.config.schemas.device import KIND_DOC, DeviceKind
from foundry.config.schemas.precision import WeightsDtype
from foundry.config.setting import setting
from foundry.core.errors import ConfigError, Violation
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import TOKENIZER, TRANSFORMERS
from foundry.run_dir.redact import one_line
from foundry.run_dir.strict_json import DamagedFileError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from peft import LoraConfig
    from torch import Tensor, nn

    from foundry.checkpoint.export_files import Weight
    from foundry.config.schemas.peft import LoRA
    from foundry.data.splits import DataSplits
    from foundry.engine.restore import RestoredRun


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of the command."""

    run: str = setting("???", "run directory, or the URL of its mirror")
    out: str = setting("???", "output folder, new or empty")
    which: str = setting("last", "checkpoint: last, best, or the number of a step")
    trust: bool = setting(False, "run the code of parts in config.yaml that are not part of foundry")
    ema: bool = setting(True, "use the averaged weights, if the run has them")
    dtype: WeightsDtype | None = setting(
        None,
        "dtype of the floating-point weights; null: the dtype of the transformers folder they came from, else as in "
        "training",
    )
    device: DeviceKind = setting(DeviceKind.auto, KIND_DOC)
    merge: bool | None = setting(
        None, "for peft=lora: write the whole model instead of the adapters alone; null: the run's peft.merge"
    )
    base: str | None = setting(
        None,
        "for adapters: new or empty folder for their base in transformers format, named in adapter_config.json",
    )

    @property
    def torch_dtype(self) -> "torch.dtype | None":
        """`dtype` as a torch.dtype."""
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype.value)


def export(options: ExportOptions) -> Outcome:
    """Export a checkpoint and print the folder; see `export_checkpoint`."""
    checkpoint, out = export_checkpoint(options), folder_option("out", options.out)
    print_path(out)
    return Outcome({"out": str(out), "checkpoint": checkpoint.name})


def export_checkpoint(options: ExportOptions) -> Path:
    """Write weights, a model card and the files of the run's data; for a language model also the transformers config.

    Weights are written to model.safetensors, or above 5 GB to several files with an index. A built-in model without
    adapters is read from the checkpoint one tensor at a time, if its export only renames tensors. For a run with
    adapters, write a PEFT folder instead, or with `merge` the base model with the adapters merged.

    Returns:
        The folder of the checkpoint.

    Raises:
        ConfigError: the run or checkpoint does not exist, `out` contains files, `merge` or `base` is set for a run
            without adapters, or transformers has no class for the model.
    """
    out = folder_option("out", options.out)
    check_output_folder("out", out)
    from foundry.config.record.frozen import load_config
    from foundry.config.schemas.model import Model
    from foundry.config.schemas.peft import LoRA
    from foundry.engine.restore import restore, retry_if_replaced
    from foundry.models.lora import merge_adapters

    run_dir = run_option("run", options.run, options.which)
    config = load_config(run_dir, trust=options.trust)
    if isinstance(config.model, Model) and (violations := list(config.model.check_export())):
        raise ConfigError(violations)
    is_merged = _check_adapter_options(options, config.peft, out)
    restored = None
    if not isinstance(config.peft, LoRA) and is_dataclass(config.model):  # a custom model may need weights to be built
        restored = retry_if_replaced(run_dir, options.which, lambda: _stream_weights(run_dir, out, options))
    if restored is None:
        restored = restore(run_dir, options.which, ema=options.ema, trust=options.trust, device=options.device)
        if isinstance(config.peft, LoRA) and not is_merged:
            _save_adapters(restored, config.peft, run_dir, options)
            return restored.checkpoint
        if is_merged:
            merge_adapters(restored.model)
        _write_from_memory(restored.model, out, options.torch_dtype)
    _write_model_files(restored, run_dir, out, options.torch_dtype)
    return restored.checkpoint


def _check_adapter_options(options: ExportOptions, peft: Any, out: Path) -> bool:
    """Return whether adapters are merged; False for a run without adapters.

    Raises:
        ConfigError: `merge` or `base` is set for a run without adapters, or `base` cannot be written or is not needed.
    """
    from foundry.config.schemas.peft import LoRA

    if not isinstance(peft, LoRA):
        for name in ("merge", "base"):
            if (value := getattr(options, name)) is not None:
                raise ConfigError(Violation(name, f"is {value} but {options.run} has no adapters; leave it out"))
        return False
    is_merged = peft.merge if options.merge is None else options.merge
    if options.base is not None:
        _check_base(options.base, out, is_merged=is_merged)
    return is_merged


def _write_model_files(restored: "RestoredRun", run_dir: Path, out: Path, dtype: "torch.dtype | None") -> None:
    """Write all files of an export of a whole model except its weights; dtype as for `_transformers_config`."""
    from foundry.commands.model_card import write_model_card
    from foundry.config.record.frozen import save_config
    from foundry.engine.run_files import write_data_files, write_vocabulary

    save_config(restored.config, out)
    write_data_files(restored.data, out)
    if restored.data.kept and restored.data.tokenizer is not None:
        write_atomically(out / TOKENIZER, restored.data.tokenizer.to_str(pretty=True))
    model_config = _transformers_config(restored.model, dtype)
    if model_config is not None:
        _save_for_transformers(model_config, restored.data, run_dir, out)
    else:
        write_vocabulary(restored.data, out)
    write_model_card(run_dir, restored, out, library="safetensors" if model_config is None else "transformers")


def _stream_weights(run_dir: Path, out: Path, options: ExportOptions) -> "RestoredRun | None":
    """Write the weights of a checkpoint one tensor at a time; return None if `_stored_weights` returns None."""
    from foundry.checkpoint.export_files import write_weights
    from foundry.checkpoint.folder import CheckpointError
    from foundry.engine.restore import open_without_weights

    restored = open_without_weights(run_dir, options.which, trust=options.trust)
    dtype = options.torch_dtype or _source_dtype(restored.model)
    weights = _stored_weights(restored, ema=options.ema, dtype=dtype)
    if weights is None:
        return None
    out.mkdir(parents=True, exist_ok=True)
    try:
        write_weights(out, weights)
    except CheckpointError as error:
        raise ConfigError(Violation("which", str(error))) from error
    return restored


def _stored_weights(restored: "RestoredRun", *, ema: bool, dtype: "torch.dtype | None") -> "dict[str, Weight] | None":
    """Return the weights to export; each is read from the checkpoint only when it is written.

    Args:
        restored: run with a model without storage.
        ema: use the averaged weights if the run kept them.
        dtype: dtype of floating-point weights; None keeps each weight's dtype.

    Returns:
        Weights by their names in the export; None if the model's `export_state` computes new tensors and therefore
        needs all weights in memory.

    Raises:
        ConfigError: the checkpoint's weights do not fit the model.
    """
    from foundry.checkpoint.export_files import Weight
    from foundry.checkpoint.folder import CheckpointError
    from foundry.checkpoint.shard import Chunk
    from foundry.checkpoint.tensors import find_weights, first_names, readable
    from foundry.core.model_hooks import hook

    state, canonical_names = restored.model.state_dict(), first_names(restored.model)
    exported = state if (export_state := hook(restored.model, "export_state")) is None else export_state(state)
    own_names = {id(tensor): name for name, tensor in state.items()}
    if any(id(tensor) not in own_names for tensor in exported.values()):
        return None
    try:
        index, stored = find_weights(
            restored.checkpoint, [name for name in state if name not in canonical_names], ema=ema
        )
        with readable(restored.checkpoint):
            for name, stored_name in stored.items():
                if (shape := index.shape(stored_name)) != state[name].shape:
                    message = f"{restored.checkpoint} has {name} as {tuple(shape)}, not {tuple(state[name].shape)}"
                    raise CheckpointError(message)
    except CheckpointError as error:
        raise ConfigError(Violation("which", str(error))) from error

    def weight(tensor: "Tensor") -> Weight:
        name = own_names[id(tensor)]
        stored_name, offsets = stored[canonical_names.get(name, name)], (0,) * tensor.ndim
        target_dtype = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return Weight(tensor.shape, target_dtype, lambda target: index.fill({stored_name: Chunk(target, offsets)}))

    return {name: weight(tensor) for name, tensor in exported.items()}


def _write_from_memory(model: "nn.Module", out: Path, dtype: "torch.dtype | None") -> None:
    """Write the weights of a model in memory to a new folder; None keeps the dtype as described in the options."""
    from foundry.checkpoint.export_files import Weight, write_weights
    from foundry.core.model_hooks import hook

    out.mkdir(parents=True, exist_ok=True)
    dtype, state = dtype or _source_dtype(model), dict(model.state_dict())
    if (export_state := hook(model, "export_state")) is not None:
        state = export_state(state)
    dtypes = {name: dtype if dtype is not None and t.is_floating_point() else t.dtype for name, t in state.items()}
    write_weights(out, {name: Weight.from_tensor(tensor, dtypes[name]) for name, tensor in state.items()})


def _source_dtype(model: "nn.Module") -> "torch.dtype | None":
    """Return the dtype of the transformers folder that the model was read from; None for other models."""
    model_config = _transformers_config(model, None)
    return None if model_config is None else model_config.dtype


def _transformers_config(model: "nn.Module", dtype: "torch.dtype | None") -> Any:
    """Return the transformers config of a model, with this dtype if it is not None; None if there is no config."""
    from foundry.core.model_hooks import hook

    if (hf_config := hook(model, "hf_config")) is None:
        return None
    model_config = hf_config()
    if dtype is not None:
        model_config.dtype = dtype
    return model_config


def _save_for_transformers(config: Any, data: "DataSplits", run_dir: Path, out: Path, **options: bool) -> None:
    """Call `save_for_transformers` with the files of the run directory.

    Raises:
        ConfigError: one of the files of the run directory is damaged.
    """
    from foundry.engine.transformers_files import save_for_transformers

    try:
        save_for_transformers(config, data, run_dir / TRANSFORMERS, out, **options)
    except DamagedFileError as error:
        raise ConfigError(Violation("run", str(error))) from None


def _check_base(text: str, out: Path, *, is_merged: bool) -> None:
    """Refuse a folder for the base that cannot be written or is not needed.

    Raises:
        ConfigError: the export is merged, or the folder is `out` or contains files.
    """
    if is_merged:
        raise ConfigError(Violation("base", f"is {text} but the export is the base with merged adapters; leave it out"))
    folder = folder_option("base", text)
    check_output_folder("base", folder)
    if folder.resolve() == out.resolve():
        raise ConfigError(Violation("base", f"is {text}, the same folder as out; choose another folder"))


def _save_adapters(restored: "RestoredRun", peft: "LoRA", run_dir: Path, options: ExportOptions) -> None:
    """Write adapters in PEFT's format, with the layer names of the exported base, the tokenizer, and if set `base`.

    Raises:
        ConfigError: `base` is set, but transformers does not support the model.
    """
    from safetensors.torch import save_file

    from foundry.commands.model_card import write_model_card
    from foundry.config.record.frozen import save_config
    from foundry.engine.run_files import write_vocabulary
    from foundry.models.lora import adapted_layers

    model, dtype = restored.model, options.torch_dtype
    model_config = _transformers_config(model, dtype)
    if options.base is not None and model_config is None:
        message = f"is {options.base} but transformers does not support {type(model).__name__}; set merge=true instead"
        raise ConfigError(Violation("base", message))
    layers = _by_exported_name(model, adapted_layers(model))
    out, base = folder_option("out", options.out), _base_folder(restored, options)
    out.mkdir(parents=True, exist_ok=True)
    save_file(_adapter_weights(layers, dtype), out / "adapter_model.safetensors", metadata={"format": "pt"})
    _peft_config(peft, layers, base, is_causal_lm=model_config is not None).save_pretrained(str(out))
    save_config(restored.config, out)
    if model_config is not None:
        _save_for_transformers(model_config, restored.data, run_dir, out, with_model=False)
    else:
        write_vocabulary(restored.data, out)
    write_model_card(run_dir, restored, out, library="peft", base=base)
    if options.base is not None:
        _save_base(restored, run_dir, folder_option("base", options.base), dtype)
    elif base is None and model_config is not None:
        _report_unnamed_base(restored.base_path)


def _by_exported_name(model: "nn.Module", layers: "Mapping[str, Any]") -> dict[str, Any]:
    """Return adapted layers by their names in an export of the base."""
    from foundry.core.model_hooks import hook

    export_state = hook(model, "export_state") or (lambda named: named)
    exported = dict[str, Any]()
    for own_name, layer in layers.items():
        (name,) = export_state({f"{own_name}.weight": layer.base_layer.weight})
        exported[name.removesuffix(".weight")] = layer
    return exported


def _adapter_weights(layers: "Mapping[str, Any]", dtype: "torch.dtype | None") -> "dict[str, Tensor]":
    """Return the weights of adapters on the CPU by their names in PEFT's format."""
    return {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part)
        .default.weight.detach()
        .contiguous()
        .to("cpu", dtype)
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
    }


def _peft_config(peft: "LoRA", layers: "Mapping[str, Any]", base: Path | None, *, is_causal_lm: bool) -> "LoraConfig":
    """Return PEFT's config of adapters of these layers; base is the transformers folder of the base model."""
    from peft import LoraConfig

    return LoraConfig(
        base_model_name_or_path=None if base is None else str(base),
        task_type="CAUSAL_LM" if is_causal_lm else None,
        r=peft.adapter_dim,
        lora_alpha=int(peft.alpha) if peft.alpha.is_integer() else peft.alpha,  # type: ignore[arg-type]
        lora_dropout=peft.adapter_dropout or 0.0,
        use_rslora=peft.rslora,
        target_modules=list(layers),
        fan_in_fan_out=any(layer.fan_in_fan_out for layer in layers.values()),
        inference_mode=True,
    )


def _report_unnamed_base(path: Path | None) -> None:
    """Print why adapter_config.json names no base; path is that of the run with the base, None for random weights."""
    source = "was initialized at random" if path is None else f"is the run {one_line(str(path))}"
    sys.stderr.write(
        f"base: adapter_config.json names no model, because the base of these adapters {source}; add base=DIR "
        "to write it as a transformers folder, or merge=true to merge the adapters into it\n"
    )


def _base_folder(restored: "RestoredRun", options: ExportOptions) -> Path | None:
    """Return the transformers folder for the base of adapters, not necessarily written yet; None without one."""
    if options.base is not None:
        return folder_option("base", options.base).resolve()
    path = restored.base_path
    return path if path is not None and (path / "config.json").is_file() else None


def _save_base(restored: "RestoredRun", run_dir: Path, folder: Path, dtype: "torch.dtype | None") -> None:
    """Write the base model of adapters for transformers; the adapters are removed from the model."""
    from foundry.models.lora import remove_adapters

    remove_adapters(restored.model)
    _write_from_memory(restored.model, folder, dtype)
    _save_for_transformers(_transformers_config(restored.model, dtype), restored.data, run_dir, folder)


def main() -> None:
    """Entry point of the command."""
    command(ExportOptions, export, name="foundry.export", doc=__doc__.split(": ", 1)[1])
