"""Batched continuation of prompts, by greedy decoding or sampling."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foundry.core.keyed_random import keyed_sequences
from foundry.core.model_hooks import hook
from foundry.generation.places import Places
from foundry.generation.sampling import draw_tokens, filtered


def disable_compilation() -> AbstractContextManager[Any]:
    """Return a context that runs compiled blocks eagerly.

    `torch.compiler.set_stance` imports the compiler, so it is called only if the compiler is imported already.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Settings of decoding.

    Attributes:
        max_new_tokens: maximum number of generated tokens.
        temperature: sampling temperature; 0 for greedy decoding.
        top_k: number of most probable tokens to sample from; None for all.
        top_p: sample from the smallest set of tokens whose probabilities sum to this value.
        stop_ids: token ids that end a continuation.
        seed: seed of the sampling.
        stream: name of the random stream; different streams are independent.
        keeps_log_probs: whether to record the log-probability of each sampled token.
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    stream: str = "generation"
    keeps_log_probs: bool = False


@dataclass(frozen=True)
class Continuation:
    """Tokens generated for a prompt.

    Attributes:
        tokens: generated token ids, including the stop token.
        is_ended: whether the last token is a stop token; False if generation ended at `max_new_tokens` or the context.
        log_probs: log-probability of each token after filtering; empty if not recorded.
    """

    tokens: tuple[int, ...]
    is_ended: bool
    log_probs: tuple[float, ...] = ()

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens without the stop token."""
        return self.tokens[:-1] if self.is_ended else self.tokens


@torch.no_grad()
def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    context: int,
    device: torch.device,
    batch_size: int = 32,
    keys: Sequence[int] | None = None,
    is_sliding: bool = True,
    in_lockstep: bool = False,
    heartbeat: Callable[[str], None] | None = None,
    images: Sequence[Tensor] | None = None,
) -> list[Continuation]:
    """Continue prompts; samples depend on seed, key and position in the continuation, not on the other prompts.

    Up to `batch_size` prompts are continued together. When continuations end, the next prompts enter the batch. Prompts
    are continued in separate batches instead if the cache of the model cannot be merged, if a sequence may outgrow the
    context, or in lockstep.

    If a sequence outgrows the context, the model either reads the last `context` tokens again for each new token
    (`is_sliding`), or the continuation ends.

    Args:
        model: maps (tokens, return_logits) to `TokenLogProbs`; its training mode is restored.
        prompts: token ids, at least one for each prompt.
        decoding: decoding settings.
        context: maximum number of tokens that the model reads.
        device: device of the model.
        batch_size: number of prompts in a batch; a model without `new_cache` always gets one at a time.
        keys: random key of each prompt; None for its index.
        is_sliding: whether to continue beyond the context with a sliding window.
        in_lockstep: call the model equally often on every rank, because each call gathers a sharded model.
        heartbeat: heartbeat of the watchdog, called with the name of the current activity.
        images: images of each prompt, (images, 3, size, size) uint8, for a vision model, which must not have
            `new_cache`; None if the prompts have no images.

    Returns:
        A continuation for each prompt, in order.
    """
    model = model.module if isinstance(model, DistributedDataParallel) else model  # DDP only reduces gradients
    keys = range(len(prompts)) if keys is None else keys
    sequences = [
        _Sequence(
            list(prompt),
            len(prompt),
            key,
            num_left=decoding.max_new_tokens if is_sliding else min(decoding.max_new_tokens, context - len(prompt)),
        )
        for prompt, key in zip(prompts, keys, strict=True)
    ]
    if images is not None:
        for sequence, seen in zip(sequences, images, strict=True):
            sequence.images = seen
    batch = _Batch(model, decoding, context=context, device=device, in_lockstep=in_lockstep)
    was_training = model.training
    model.eval()
    try:
        with disable_compilation():  # otherwise each length would be compiled separately
            batch.run(sequences, batch_size, heartbeat)
    finally:
        model.train(was_training)
    return [sequence.continuation() for sequence in sequences]


def _new_cache(model: nn.Module, length: int, padding: Tensor | None = None) -> Any:
    make = hook(model, "new_cache")
    return None if make is None else make(length, padding)


@dataclass(eq=False)
class _Sequence:
    """A prompt with its continuation.

    Attributes:
        tokens: the prompt and the generated tokens.
        num_prompt: number of tokens of the prompt.
        key: key of the random numbers.
        num_left: number of tokens that may still be generated; 0 after a stop token.
        images: images of the prompt.
        uniforms: random number of each generated token.
        log_probs: recorded log-probabilities.
        steps: forward passes since the sequence entered the batch.
        is_ended: whether the last token is a stop token.
    """

    tokens: list[int]
    num_prompt: int
    key: int
    num_left: int
    images: Tensor | None = None
    uniforms: Sequence[float] = ()
    log_probs: list[float] = field(default_factory=list)
    steps: int = 0
    is_ended: bool = False

    def continuation(self) -> Continuation:
        return Continuation(tuple(self.tokens[self.num_prompt :]), self.is_ended, tuple(self.log_probs))


class _Batch:
    """Sequences that are continued together."""

    def __init__(
        self,
        model: nn.Module,
        decoding: Decoding,
        *,
        context: int,
        device: torch.device,
        in_lockstep: bool,
    ) -> None:
        self._model, self._decoding, self._context, self._device = model, decoding, context, device
        self._in_lockstep = in_lockstep
        self._rows: list[_Sequence] = []  # in the order of the model's batch
        self._cache: Any = None
        self._has_repeats = False  # whether a prompt has several continuations

    def run(self, sequences: Sequence[_Sequence], batch_size: int, heartbeat: Callable[[str], None] | None) -> None:
        """Continue all sequences, at most `batch_size` at a time."""
        waiting = [sequence for sequence in sequences if self._stays(sequence)]
        prompts = [tuple(sequence.tokens) for sequence in waiting]
        self._has_repeats = len(set(prompts)) < len(prompts)
        places = self._places(prompts, batch_size)
        while True:
            is_active = [self._stays(sequence) for sequence in self._rows]
            entering = [waiting[index] for index in places.enter(sum(is_active))]
            if not (any(is_active) or entering):
                break
            if heartbeat is not None:
                heartbeat("generating answers")
            self._drop_finished(is_active, makes_room=bool(entering))
            self._add(*self._choose(self._read(entering)))

    def _places(self, prompts: Sequence[Sequence[int]], batch_size: int) -> Places:
        """Return the places of the batch; it decides whether prompts enter while other prompts are continued."""
        cache = _new_cache(self._model, 1)
        longest = max(map(len, prompts), default=0) + self._decoding.max_new_tokens - 1
        joins = cache is not None and cache.can_merge and longest <= self._context and not self._in_lockstep
        return Places(prompts, 1 if cache is None else batch_size, joins=joins)

    def _stays(self, sequence: _Sequence) -> bool:
        """Return whether a sequence enters the batch or stays in it."""
        return sequence.steps < self._decoding.max_new_tokens if self._in_lockstep else sequence.num_left > 0

    def _drop_finished(self, is_active: Sequence[bool], *, makes_room: bool) -> None:
        """Remove finished rows for entering prompts, if the cache is full, or if they are half of the batch."""
        rows = [row for row, is_row_active in enumerate(is_active) if is_row_active]
        is_due = makes_room or self._is_full or 2 * len(rows) <= len(is_active)
        if len(rows) == len(is_active) or not is_due:
            return
        self._rows = [self._rows[row] for row in rows]
        if not rows:
            self._cache = None
        elif self._cache is not None:
            self._cache.keep(torch.tensor(rows, device=self._device))

    @property
    def _is_full(self) -> bool:
        return self._cache is None or self._cache.filled == self._cache.length

    def _read(self, entering: Sequence[_Sequence]) -> Tensor:
        """Return the logits of the next token of the rows and of `entering`, new rows; (rows, vocab) float32."""
        max_new_tokens = self._decoding.max_new_tokens
        if self._is_full:
            self._rows += entering
            num_left = max_new_tokens - min(sequence.steps for sequence in self._rows)
            self._cache, logits = self._read_windows(self._rows, num_left)
            return logits.float()
        last_tokens = torch.tensor([row.tokens[-1] for row in self._rows], device=self._device)
        logits = self._forward(last_tokens[:, None], self._cache)
        if entering:
            cache, first_logits = self._read_windows(entering, 1)
            self._rows += entering
            self._cache.merge(cache, max(row.num_prompt for row in self._rows) + max_new_tokens - 1)
            logits = torch.cat((logits, first_logits))
        return logits.float()

    def _read_windows(self, sequences: Sequence[_Sequence], num_left: int) -> tuple[Any, Tensor]:
        """Read the last tokens of each sequence; return their cache, and the logits of the next token, (rows, vocab).

        The cache has space for the tokens that are read if `num_left` more tokens are generated.
        """
        row_windows = [tuple(sequence.tokens[-self._context :]) for sequence in sequences]
        windows = list(dict.fromkeys(row_windows)) if self._has_repeats else row_windows
        longest = max(map(len, windows))
        padding_lengths = [longest - len(window) for window in windows]
        padding = torch.tensor(padding_lengths, device=self._device) if any(padding_lengths) else None
        cache = _new_cache(self._model, min(self._context, longest + num_left - 1), padding)
        padded = [
            [0] * num_padding + list(window) for num_padding, window in zip(padding_lengths, windows, strict=True)
        ]
        images = [sequence.images for sequence in sequences if sequence.images is not None]
        inputs = {"images": torch.stack(images).to(self._device)} if images else {}
        logits = self._forward(torch.tensor(padded, device=self._device), cache, **inputs)
        if self._has_repeats:
            places = {window: place for place, window in enumerate(windows)}
            expanded = torch.tensor([places[window] for window in row_windows], device=self._device)
            logits = logits[expanded]
            if cache is not None:
                cache.expand(expanded)
        return cache, logits

    def _forward(self, tokens: Tensor, cache: Any, **inputs: Tensor) -> Tensor:
        """Return the logits of the last column, (rows, vocab); the tokens are appended to the cache, if any."""
        from_cache = {} if cache is None else {"cache": cache}
        logits: Tensor = self._model(tokens, return_logits=True, **from_cache, **inputs).logits[:, -1]
        return logits

    def _choose(self, logits: Tensor) -> tuple[list[int], list[float]]:
        """Return the next token of each row, and its log-probability if it is recorded."""
        decoding, token_ids, scores = self._decoding, logits.argmax(-1), logits
        if decoding.temperature > 0:
            scores = filtered(logits, temperature=decoding.temperature, top_k=decoding.top_k, top_p=decoding.top_p)
            # If the temperature is so small that the division overflows, use the argmax.
            sampled = draw_tokens(scores, self._next_uniforms())
            token_ids = torch.where(scores.amax(-1).isfinite(), sampled, token_ids)
        log_probs: list[float] = []
        if decoding.keeps_log_probs:
            log_probs = scores.log_softmax(-1).gather(-1, token_ids[:, None]).squeeze(-1).tolist()
        tokens: list[int] = token_ids.tolist()
        return tokens, log_probs

    def _next_uniforms(self) -> Tensor:
        """Return the random number of each row for its next token, (rows,) float64."""
        if new := [row for row in self._rows if not row.uniforms]:
            keys, last = [row.key for row in new], self._decoding.max_new_tokens
            drawn = keyed_sequences(self._decoding.seed, keys, last, stream=self._decoding.stream).tolist()
            for row, uniforms in zip(new, drawn, strict=True):
                row.uniforms = uniforms
        # A finished row that is still in the batch may have had more steps than numbers.
        numbers = [row.uniforms[min(row.steps, len(row.uniforms) - 1)] for row in self._rows]
        return torch.tensor(numbers, dtype=torch.float64)

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        for place, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            row.steps += 1
            if row.num_left > 0:
                row.tokens.append(token)
                row.log_probs += log_probs[place : place + 1]
                row.is_ended = token in self._decoding.stop_ids
                row.num_left = 0 if row.is_ended else row.num_left - 1
