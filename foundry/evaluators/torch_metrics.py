"""Metrics of torchmetrics in an evaluation: fed on every rank with its share, the same number on all of them."""

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
    """Metrics by the user's names for them; the names of one's several values begin with it, as `rougeL_fmeasure`.

    What is summed is summed in float64.

    Args:
        metrics: instances of `torchmetrics.Metric`.
        where: the key that they are set by, for errors.

    Raises:
        ConfigError: one is no such metric.
    """

    def __init__(self, metrics: "Mapping[str, Metric]", where: str) -> None:
        from torchmetrics import Metric

        for name, metric in metrics.items():
            if not isinstance(metric, Metric):
                message = f"is {type(metric).__name__}, which is no torchmetrics.Metric"
                raise ConfigError(Violation(f"{where}.{name}", message))
        self._metrics, self._where = dict(metrics), where

    def start(self, device: torch.device) -> None:
        """Forget what an earlier evaluation has measured."""
        for metric in self._metrics.values():
            metric.reset()
            metric.to(device).set_dtype(torch.float64)

    def add(self, predictions: Tensor, targets: Tensor) -> None:
        """Feed the metrics.

        Args:
            predictions: (items, classes) scores or (items, ...) values, float32; no item: nothing is measured.
            targets: (items,) int64 classes, or (items, ...) values.
        """
        for metric in self._metrics.values() if len(targets) else ():
            is_of_text = type(metric).__module__.startswith("torchmetrics.text.")  # perplexity, of sequences
            metric.update(*((predictions[None], targets[None]) if is_of_text else (predictions, targets)))

    def measure(self, world: World) -> dict[str, float]:
        """What all ranks have been fed together; every rank calls this. Nothing where nobody has been fed.

        Raises:
            ConfigError: a metric cannot be joined over ranks, or has other values than numbers.
        """
        if not any(gather(any(metric.update_called for metric in self._metrics.values()), world)):
            return {}
        for name, metric in self._metrics.items():
            metric.process_group = world.dp_group  # torchmetrics joins over it what ranks have kept
            self._even_out(name, metric, world)
        return self._values()

    def measure_texts(self, texts: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """What is measured of all answers, which every rank is given in the same order, so that none asks another."""
        for metric in self._metrics.values() if texts else ():
            metric.reset()
            metric.sync_on_compute = False
            taken = get_origin(inspect.signature(metric.update).parameters["target"].annotation)
            has_several = taken is Sequence  # references of each answer, as for BLEU
            metric.update(list(texts), [[text] for text in references] if has_several else list(references))
        return self._values() if texts else {}

    def _even_out(self, name: str, metric: "Metric", world: World) -> None:
        """Give a rank that was fed nothing empty tensors of the kind that the others keep in lists, so that all fit.

        Raises:
            ConfigError: the metric keeps lists that have no meaning as one.
        """
        from torchmetrics.utilities import dim_zero_cat

        lists = {key: value for key, value in metric.metric_state.items() if isinstance(value, list)}
        if world.dp_size == 1 or not lists:
            return
        if any(metric._reductions[key] is not dim_zero_cat for key in lists):  # there is no public way to ask
            message = "keeps lists that torchmetrics cannot join over ranks; measure it in one process: foundry.eval"
            raise ConfigError(Violation(f"{self._where}.{name}", message))
        whole = {key: dim_zero_cat(value) for key, value in lists.items() if value}
        kinds = [(str(value.dtype).removeprefix("torch."), tuple(value.shape[1:])) for value in whole.values()]
        dtypes = next(filter(None, gather(kinds, world)))
        for key, (dtype, shape) in zip(lists, dtypes, strict=True):
            empty = torch.empty((0, *shape), dtype=getattr(torch, dtype), device=world.device)
            setattr(metric, key, [whole.get(key, empty)])

    def _values(self) -> dict[str, float]:
        """Every metric's value, by name.

        Raises:
            ConfigError: one is no number, nor numbers by name or in a vector.
        """
        measured = dict[str, float]()
        for name, metric in self._metrics.items():
            value = metric.compute()
            if isinstance(value, Tensor) and value.ndim == 1 and value.numel() > 1:  # such as one for each class
                value = dict(enumerate(value))
            values = {name: value}
            if isinstance(value, dict):
                values = {str(k) if str(k).startswith(name) else f"{name}_{k}": one for k, one in value.items()}
            for key, one in values.items():
                if not isinstance(one, Tensor) or one.numel() != 1:
                    message = f"measures {type(one).__name__} of several values; choose another metric or average"
                    raise ConfigError(Violation(f"{self._where}.{name}", message))
                measured[key] = float(one)
        return measured
