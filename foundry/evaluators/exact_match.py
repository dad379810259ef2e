"""Whether a model answers held-out prompts as they are to be answered."""

import torch
from torch import nn

from foundry.config.errors import ConfigError, Violation
from foundry.config.metrics import EXACT_MATCH_METRICS
from foundry.data.splits import DataSplits
from foundry.objectives.generation import Decoding, generate
from foundry.objectives.text_samples import context_of
from foundry.parallel.whole_weights import gathered
from foundry.training.protocols import EvaluationContext


class ExactMatch:
    """Share of the prompts whose greedy answer is the right one, letter by letter but for white space around it.

    `ended` is the share of answers that end by themselves, within the model's context. Prompts are divided among the
    ranks in fixed batches, so that any number of ranks measures the same; each needs memory for the whole model.

    Args:
        data: has `prompts`.
        max_new_tokens: longest answer in tokens.
        per_gpu_batch_size: prompts at a time.
        max_samples: prompts, the first ones; None: all.

    Raises:
        ConfigError: the data has no prompts with answers.
    """

    metrics = EXACT_MATCH_METRICS

    def __init__(
        self,
        *,
        data: DataSplits,
        max_new_tokens: int = 256,
        per_gpu_batch_size: int = 32,
        max_samples: int | None = None,
    ) -> None:
        self._data, self._batch_size = data, per_gpu_batch_size
        self._prompts = data.prompts[: len(data.prompts) if max_samples is None else max_samples]
        self._decoding = Decoding(max_new_tokens=max_new_tokens, stop_ids=frozenset(data.stop_ids))
        if not len(self._prompts):
            message = "needs data that has prompts with answers, such as data=chats"
            raise ConfigError(Violation("evaluation.evaluators.exact_match", message))

    def evaluate(self, model: nn.Module, context: EvaluationContext) -> dict[str, float]:
        """Answer and compare."""
        world, size = context.world, self._batch_size
        correct = ended = 0
        with gathered(model) as whole:
            for start in range(world.dp_rank * size, len(self._prompts), world.dp_size * size):
                context.beat("answering prompts")
                prompts = self._prompts[start : start + size]
                with context.autocast():
                    found = generate(
                        whole,
                        [prompt.tokens for prompt in prompts],
                        self._decoding,
                        context=context_of(whole, self._data),
                        device=world.device,
                        batch_size=size,
                        is_sliding=False,
                    )
                ended += sum(continuation.is_ended for continuation in found)
                for prompt, continuation in zip(prompts, found, strict=True):
                    answer = self._data.tokenizer.decode(continuation.answer, skip_special_tokens=True)
                    correct += answer.strip() == prompt.answer.strip()
        counts = world.dp_sum(torch.tensor([correct, ended], dtype=torch.float64, device=world.device))
        exact_match, has_ended = (counts / len(self._prompts)).tolist()
        return {"exact_match": exact_match, "ended": has_ended}
