"""Metrics of torchmetrics in an evaluation: each rank adds its share of the data, and all ranks get equal values."""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, get_origin

import torch
from torch import Tensor

from foundry.core.errors import ConfigError, Violation
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World

if TYPE_CHECKING:
    from torchmetrics import Metric


class TorchMetrics:
    """Metrics of torchmetrics by name; if one has several values, their names start with its name: `rougeL_fmeasure`.

    From `start` to `measure`, sums are computed in float64.

    Args:
        metrics: instances of `torchmetrics.Metric`.
        config_key: config key of the metrics, for errors.

    Raises:
        ConfigError: a value of `metrics` is not a `torchmetrics.Metric`.
    """

    def __init__(self, metrics: "Mapping[str, Metric]", config_key: str) -> None:
        from torchmetrics import Metric

        for name, metric in metrics.items():
            if not isinstance(metric, Metric):
                message = f"is {type(metric).__name__}, which is not a torchmetrics.Metric"
                raise ConfigError(Violation(f"{config_key}.{name}", message))
        self._metrics, self._config_key = dict(metrics), config_key

    def start(self, device: torch.device) -> None:
        """Reset the metrics and move them to a device."""
        for metric in self._metrics.values():
            metric.reset()
            metric.to(device).set_dtype(torch.float64)

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        """Update the metrics.

        Args:
            predictions: (items, classes) scores or (items, ...) values, float32; the update is skipped if there are no
                items.
            targets: (items,) int64 classes, or (items, ...) values.
        """
        for metric in self._metrics.values() if len(targets) else ():
            is_of_text = type(metric).__module__.startswith("torchmetrics.text.")  # perplexity expects sequences
            metric.update(*((predictions[None], targets[None]) if is_of_text else (predictions, targets)))

    def measure(self, world: World) -> dict[str, float]:
        """Return the metrics over all ranks, which must all call this; empty if no rank has updated the metrics.

        Raises:
            ConfigError: a metric cannot be synchronized over ranks, or a value is not a number.
        """
        if not any(gather(any(metric.update_called for metric in self._metrics.values()), world)):
            return {}
        for name, metric in self._metrics.items():
            metric.process_group = world.dp_group  # torchmetrics synchronizes its state over this group
            self._even_out(name, metric, world)
        return self._values()

    def measure_texts(self, texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Return the metrics of texts and references; every rank passes all texts, so ranks need no synchronization."""
        for metric in self._metrics.values() if texts else ():
            metric.reset()
            metric.sync_on_compute = False
            target_type = get_origin(inspect.signature(metric.update).parameters["target"].annotation)
            has_several = target_type is Sequence  # several references per answer, as for BLEU
            metric.update(list(texts), [[text] for text in references] if has_several else list(references))
        return self._values() if texts else {}

    def _even_out(self, name: str, metric: "Metric", world: World) -> None:
        """Give ranks without updates empty tensors in their list states, so that the states can be concatenated.

        Raises:
            ConfigError: the metric has list states that cannot be concatenated.
        """
        from torchmetrics.utilities import dim_zero_cat

        lists = {key: value for key, value in metric.metric_state.items() if isinstance(value, list)}
        if world.dp_size == 1 or not lists:
            return
        if any(metric._reductions[key] is not dim_zero_cat for key in lists):  # there is no public API for this
            message = (
                "keeps lists that torchmetrics cannot combine across ranks; measure it in one process with foundry.eval"
            )
            raise ConfigError(Violation(f"{self._config_key}.{name}", message))
        tensors = {key: dim_zero_cat(value) for key, value in lists.items() if value}
        kinds = [(str(value.dtype).removeprefix("torch."), tuple(value.shape[1:])) for value in tensors.values()]
        dtypes = next(filter(None, gather(kinds, world)))
        for key, (dtype, shape) in zip(lists, dtypes, strict=True):
            empty = torch.empty((0, *shape), dtype=getattr(torch, dtype), device=world.device)
            setattr(metric, key, [tensors.get(key, empty)])

    def _values(self) -> dict[str, float]:
        """Return every metric's value by name.

        Raises:
            ConfigError: a value is not a number, a dict of numbers or a vector.
        """
        results = dict[str, float]()
        for name, metric in self._metrics.items():
            value = metric.compute()
            if isinstance(value, Tensor) and value.ndim == 1 and value.numel() > 1:  # such as one for each class
                value = dict(enumerate(value))
            values = {name: value}
            if isinstance(value, dict):
                values = {str(k) if str(k).startswith(name) else f"{name}_{k}": number for k, number in value.items()}
            for key, number in values.items():
                if not isinstance(number, Tensor) or number.numel() != 1:
                    message = f"returns {type(number).__name__} with several values; choose another metric or average"
                    raise ConfigError(Violation(f"{self._config_key}.{name}", message))
                results[key] = float(number)
        return results
