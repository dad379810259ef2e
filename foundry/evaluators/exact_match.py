"""Exact match of the model's answers to held-out prompts, and their rewards."""

import logging
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from foundry.config.configured import configured_by
from foundry.config.metrics import EXACT_MATCH_METRICS
from foundry.config.schemas.built_in_evaluators import ExactMatch as ExactMatchSettings
from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import EvaluationContext
from foundry.data.corpora.tokenizer import decode_tokens
from foundry.data.splits import DataSplits, Prompt
from foundry.evaluators.torch_metrics import TorchMetrics
from foundry.generation.decoding import Continuation, Decoding, generate
from foundry.generation.scoring import REWARD, Answer, Judge
from foundry.generation.text_samples import context_of
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World
from foundry.parallel.whole_weights import gathered

if TYPE_CHECKING:
    from torchmetrics import Metric

log = logging.getLogger(__name__)


class ExactMatch:
    """Fraction of prompts whose greedy answer equals the reference answer, ignoring whitespace around it.

    `ended` is the fraction of answers that end with a stop token within the model's context. If no prompt has a
    reference answer, there is no `exact_match`. In a run with an environment, `reward` is the mean over the answers
    with a reward, `reward_<score>` the mean of each score, and `reward_missing` the fraction of answers without a
    reward. Prompts are divided among the ranks in fixed batches, so that the result does not depend on the number of
    ranks; each rank needs memory for the whole model.

    Args:
        settings: number of prompts, and maximum length of an answer.
        data: data with `prompts`.
        judge: judge of the run's environment; None without an environment.
        torchmetrics: additional text metrics by name; they receive the answers and the reference answers, without
            whitespace around them.

    Raises:
        ConfigError: the data has no prompts, or `torchmetrics` is given but no prompt has a reference answer.
    """

    @configured_by(ExactMatchSettings)
    def __init__(
        self,
        settings: ExactMatchSettings,
        *,
        data: DataSplits,
        judge: Judge | None = None,
        torchmetrics: "Mapping[str, Metric] | None" = None,
    ) -> None:
        self.settings, self._data, self._judge = settings, data, judge
        self._prompts = data.prompts[: settings.max_samples]
        self._decoding = Decoding(max_new_tokens=settings.max_new_tokens, stop_ids=frozenset(data.stop_ids))
        has_answers = any(prompt.answer is not None for prompt in self._prompts)
        base_names = EXACT_MATCH_METRICS if has_answers else tuple(n for n in EXACT_MATCH_METRICS if n != "exact_match")
        self.metrics: tuple[str, ...] | None = base_names
        if judge is not None:
            self.metrics = None if judge.metrics is None else (*base_names, *judge.metrics)
        self._metric_names, key = self.metrics, "evaluation.evaluators.exact_match"
        if not len(self._prompts) or (torchmetrics and not has_answers):
            message = "requires data with prompts and answers, such as data=chats"
            raise ConfigError(Violation(key, message))
        self._torchmetrics = TorchMetrics(torchmetrics, f"{key}.torchmetrics") if torchmetrics else None
        if torchmetrics:
            self.metrics = None

    def evaluate(self, model: nn.Module, context: EvaluationContext) -> dict[str, float]:
        """Generate and compare answers; metrics without values are omitted, except `reward` with a judge: it is NaN."""
        world, size = context.world, self.settings.per_gpu_batch_size
        rows, pairs = list[dict[str, float]](), list[tuple[int, str, str]]()
        with gathered(model) as full_model:
            for start in range(world.dp_rank * size, len(self._prompts), world.dp_size * size):
                context.heartbeat("answering prompts")
                prompts = self._prompts[start : start + size]
                seen = [prompt.images for prompt in prompts if prompt.images is not None]
                with context.autocast():
                    continuations = generate(
                        full_model,
                        [prompt.tokens for prompt in prompts],
                        self._decoding,
                        context=context_of(full_model, self._data),
                        device=world.device,
                        batch_size=size,
                        is_sliding=False,
                        heartbeat=context.heartbeat,
                        images=seen or None,
                    )
                if world.leads_share:
                    texts = [decode_tokens(self._data.tokenizer, continuation.answer) for continuation in continuations]
                    rows += self._measure(prompts, continuations, texts, context)
                    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True), start):
                        if prompt.answer is not None:
                            pairs.append((index, text.strip(), prompt.answer.strip()))
        means = self._average(rows, world)
        if self._torchmetrics is None:
            return means
        all_pairs = sorted(pair for part in gather(pairs, world) for pair in part)
        return means | self._torchmetrics.measure_texts(
            [text for _, text, _ in all_pairs], [text for *_, text in all_pairs]
        )

    def _average(self, rows: Sequence[dict[str, float]], world: World) -> dict[str, float]:
        """Return the mean of each metric over the answers of all ranks that have it; `rows` are of this rank."""
        names = self._metric_names
        if names is None:  # other ranks may have metrics that this rank lacks, from scores of a custom environment
            names = tuple(sorted({REWARD, *(name for part in gather(_names(rows), world) for name in part)}))
        sums = torch.tensor(
            [[sum(row.get(name, 0.0) for row in rows), sum(name in row for row in rows)] for name in names],
            dtype=torch.float64,
            device=world.device,
        )
        totals = world.all_reduce_sum(sums).tolist()
        means = {name: total / count for name, (total, count) in zip(names, totals, strict=True) if count}
        if self._judge is not None and REWARD not in means:
            log.warning("environment %s gave no reward for any held-out answer", self._judge.name)
            means[REWARD] = math.nan
        return means

    def _measure(
        self,
        prompts: Sequence[Prompt],
        continuations: Sequence[Continuation],
        texts: Sequence[str],
        context: EvaluationContext,
    ) -> list[dict[str, float]]:
        """Return the metrics of each answer by name."""
        tokenizer = self._data.tokenizer
        rows = [{"ended": float(continuation.is_ended)} for continuation in continuations]
        for prompt, text, row in zip(prompts, texts, rows, strict=True):
            if prompt.answer is not None:
                row["exact_match"] = float(text.strip() == prompt.answer.strip())
        if self._judge is None:
            return rows
        answers = [
            Answer(text, decode_tokens(tokenizer, prompt.tokens), prompt.own_columns, not continuation.is_ended)
            for prompt, text, continuation in zip(prompts, texts, continuations, strict=True)
        ]
        for row, judgement in zip(rows, self._judge.judge(answers, context.heartbeat), strict=True):
            row |= judgement.metrics
        return rows


def _names(rows: Sequence[dict[str, float]]) -> list[str]:
    return sorted({name for row in rows for name in row})
