"""Answers of a model as rows of tokens, with what was known when they were drawn."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from foundry.data.corpora.tokenizer import decode_tokens
from foundry.data.splits import Prompt
from foundry.environments.judge import Judgement
from foundry.environments.protocol import Answer
from foundry.generation.decoding import Continuation, Decoding, generate, uncompiled
from foundry.models.token_log_probs import IGNORED_TARGET
from foundry.parallel.gathering import gather
from foundry.parallel.process_group import World

Record = Callable[[nn.Module, Tensor, Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Completion:
    """An answer to a prompt.

    Attributes:
        answer: as an environment sees it.
        length: of prompt and completion together, without the last token, which the model is not given.
        judgement: what it is worth.
    """

    answer: Answer
    length: int
    judgement: Judgement = field(default_factory=lambda: Judgement(None, {}))


class Completions:
    """Rows of a rollout; those that other ranks make are 0 until they are shared.

    Args:
        count: of completions.
        longest: most tokens of a row.

    Attributes:
        tokens: (count, longest) int64, prompt and completion, padded on the right.
        targets: (count, longest) int64, the same one token later, -100 where that is not of the completion.
        columns: (count, longest) float32 by name, such as the log-probability of each target when it was drawn.
    """

    def __init__(self, count: int, longest: int) -> None:
        self.tokens = torch.zeros(count, longest, dtype=torch.int64)
        self.targets = torch.zeros(count, longest, dtype=torch.int64)
        self.columns: dict[str, Tensor] = {}

    def share(self, world: World) -> None:
        """Have every rank know all rows; all ranks call this together."""
        self.tokens, self.targets = (_summed(tensor, world) for tensor in (self.tokens, self.targets))
        # A rank that has made no rows has no columns either.
        names = sorted({name for part in gather(list(self.columns), world) for name in part})
        own = {name: self.columns.get(name, torch.zeros(self.tokens.shape)) for name in names}
        self.columns = {name: _summed(column, world) for name, column in own.items()}


@dataclass(frozen=True)
class Made:
    """What has come of some prompts; tensors are (rows, seq), in host memory."""

    answers: Sequence[Completion]
    tokens: Tensor
    targets: Tensor
    columns: Mapping[str, Tensor]


def _summed(tensor: Tensor, world: World) -> Tensor:
    return world.dp_sum(tensor.to(world.device)).cpu() if world.dp_size > 1 else tensor


def complete(
    model: nn.Module,
    prompts: Sequence[Prompt],
    keys: Sequence[int],
    decoding: Decoding,
    *,
    context: int,
    world: World,
    autocast: Callable[[], AbstractContextManager[Any]],
    record: Record,
    tokenizer: Any,
    beat: Callable[[str], None],
) -> Made:
    """Answer prompts in one batch, and record what the models as they are say of the answers.

    Args:
        model: with all of its weights.
        prompts: to be answered.
        keys: what is drawn for each is keyed by.
        decoding: how.
        context: most tokens that the model reads.
        world: this rank and the others.
        autocast: a context for forward passes in the arithmetic of the run.
        record: see `Objective`.
        tokenizer: makes text of the answers.
        beat: says what is being done, to a watchdog.
    """
    with autocast():
        found = generate(
            model,
            [prompt.tokens for prompt in prompts],
            decoding,
            context=context,
            device=world.device,
            batch_size=len(prompts),
            keys=keys,
            is_sliding=False,
            beat=beat,
        )
    answers, tokens, targets, sampler = _rows(prompts, found, tokenizer)
    was_training = model.training
    model.eval()
    try:
        with autocast(), uncompiled():
            recorded = record(model, tokens.to(world.device), targets.to(world.device))
    finally:
        model.train(was_training)
    columns = {name: column.float().cpu() for name, column in recorded.items()}
    return Made(answers, tokens, targets, {"sampler": sampler, **columns})


def _rows(
    prompts: Sequence[Prompt], found: Sequence[Continuation], tokenizer: Any
) -> tuple[list[Completion], Tensor, Tensor, Tensor]:
    """The answers, and (rows, seq) each: tokens, targets, and with which log-probability the targets were drawn."""
    rows = [[*prompt.tokens, *one.tokens] for prompt, one in zip(prompts, found, strict=True)]
    longest = max(map(len, rows)) - 1
    tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
    targets = torch.full((len(rows), longest), IGNORED_TARGET)
    sampler = torch.zeros(len(rows), longest)
    answers = list[Completion]()
    for number, (row, prompt, one) in enumerate(zip(rows, prompts, found, strict=True)):
        own = torch.tensor(row)
        start, end = len(prompt.tokens) - 1, len(row) - 1
        tokens[number, :end] = own[:-1]
        targets[number, start:end] = own[start + 1 :]
        sampler[number, start:end] = torch.tensor(one.log_probs)
        text = decode_tokens(tokenizer, one.answer)
        answer = Answer(text, decode_tokens(tokenizer, prompt.tokens), prompt.own_columns, not one.is_ended)
        answers.append(Completion(answer, end))
    return answers, tokens, targets, sampler


def place(completions: Completions, made: Made, start: int) -> None:
    """Put what a chunk has come to into its rows, from `start` on."""
    rows, longest = slice(start, start + len(made.tokens)), made.tokens.shape[1]
    completions.tokens[rows, :longest] = made.tokens
    completions.targets[rows] = IGNORED_TARGET
    completions.targets[rows, :longest] = made.targets
    for name, column in made.columns.items():
        whole = completions.columns.setdefault(name, torch.zeros(completions.tokens.shape))
        whole[rows, :longest] = column
