"""Batched continuation of prompts, by greedy decoding or sampling."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from foundry.core.keyed_random import keyed_sequences
from foundry.core.model_hooks import hook
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
    size = batch_size if _new_cache(model, 1) is not None else 1
    results, was_training = list[Continuation](), model.training
    model.eval()
    try:
        with disable_compilation():  # otherwise each length would be compiled separately
            for start in range(0, len(prompts), size):
                batch_slice = slice(start, start + size)
                seen = None if images is None else torch.stack(list(images[batch_slice])).to(device)
                batch = _Batch(
                    model,
                    prompts[batch_slice],
                    keys[batch_slice],
                    decoding,
                    context=context,
                    device=device,
                    images=seen,
                )
                batch.run(is_sliding=is_sliding, in_lockstep=in_lockstep, heartbeat=heartbeat)
                results += batch.continuations()
    finally:
        model.train(was_training)
    return results


def _new_cache(model: nn.Module, length: int, padding: Tensor | None = None) -> Any:
    make = hook(model, "new_cache")
    return None if make is None else make(length, padding)


class _Batch:
    """Prompts that are continued together; `_drop_finished` removes prompts whose continuation has ended."""

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        keys: Sequence[int],
        decoding: Decoding,
        *,
        context: int,
        device: torch.device,
        images: Tensor | None = None,
    ) -> None:
        self._model, self._decoding, self._context, self._device = model, decoding, context, device
        self._inputs = {} if images is None else {"images": images}
        self._prompts = [len(prompt) for prompt in prompts]
        self._sequences = [list(prompt) for prompt in prompts]
        self._log_probs: list[list[float]] = [[] for _ in prompts]
        self._is_ended = [False] * len(prompts)
        self._is_done = [False] * len(prompts)  # ended by a stop token, or without sliding at the end of the context
        self._rows = list(range(len(prompts)))  # indices of the prompts in the model's batch
        self._cache: Any = None
        num_drawn = decoding.max_new_tokens if decoding.temperature > 0 else 0
        self._uniforms = keyed_sequences(decoding.seed, keys, num_drawn, stream=decoding.stream)

    def run(self, *, is_sliding: bool, in_lockstep: bool, heartbeat: Callable[[str], None] | None = None) -> None:
        for step in range(self._decoding.max_new_tokens):
            if heartbeat is not None:
                heartbeat("generating answers")
            self._is_done = [
                is_ended or (not is_sliding and len(sequence) >= self._context)
                for is_ended, sequence in zip(self._is_ended, self._sequences, strict=True)
            ]
            if not in_lockstep:
                self._drop_finished()
                if not self._rows:
                    break
            self._add(*self._choose(self._read(self._decoding.max_new_tokens - step), step))

    def continuations(self) -> Iterator[Continuation]:
        rows = zip(self._prompts, self._sequences, self._is_ended, self._log_probs, strict=True)
        for length, sequence, is_ended, log_probs in rows:
            yield Continuation(tuple(sequence[length:]), is_ended, tuple(log_probs))

    def _read(self, num_left: int) -> Tensor:
        """Return the logits of the next token, (rows, vocab) float32; `num_left` tokens remain to be generated."""
        sequences = [self._sequences[row] for row in self._rows]
        expanded: Tensor | None = None
        if self._cache is not None and self._cache.filled < self._cache.length:
            tokens = torch.tensor([sequence[-1:] for sequence in sequences], device=self._device)
        else:
            row_windows = [tuple(sequence[-self._context :]) for sequence in sequences]
            windows = list(dict.fromkeys(row_windows))  # a prompt with several answers is read once
            if len(windows) < len(row_windows):
                places = {window: place for place, window in enumerate(windows)}
                expanded = torch.tensor([places[window] for window in row_windows], device=self._device)
            longest = max(map(len, windows))
            padding_lengths = [longest - len(window) for window in windows]
            padding = torch.tensor(padding_lengths, device=self._device) if any(padding_lengths) else None
            self._cache = _new_cache(self._model, min(self._context, longest + num_left - 1), padding)
            padded = [
                [0] * num_padding + list(window) for num_padding, window in zip(padding_lengths, windows, strict=True)
            ]
            tokens = torch.tensor(padded, device=self._device)
        cache = {} if self._cache is None else {"cache": self._cache}
        logits: Tensor = self._model(tokens, return_logits=True, **cache, **self._inputs).logits[:, -1]
        if expanded is not None:
            logits = logits[expanded]
            self._cache.expand(expanded)
        return logits.float()

    def _choose(self, logits: Tensor, step: int) -> tuple[list[int], list[float]]:
        """Return the next token of each row, and its log-probability if it is recorded."""
        decoding, token_ids, scores = self._decoding, logits.argmax(-1), logits
        if decoding.temperature > 0:
            scores = filtered(logits, temperature=decoding.temperature, top_k=decoding.top_k, top_p=decoding.top_p)
            # If the temperature is so small that the division overflows, use the argmax.
            sampled = draw_tokens(scores, self._uniforms[self._rows, step])
            token_ids = torch.where(scores.amax(-1).isfinite(), sampled, token_ids)
        log_probs: list[float] = []
        if decoding.keeps_log_probs:
            log_probs = scores.log_softmax(-1).gather(-1, token_ids[:, None]).squeeze(-1).tolist()
        tokens: list[int] = token_ids.tolist()
        return tokens, log_probs

    def _add(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        for place, (row, token) in enumerate(zip(self._rows, tokens, strict=True)):
            if not self._is_done[row]:
                self._sequences[row].append(token)
                self._log_probs[row] += log_probs[place : place + 1]
                self._is_ended[row] = token in self._decoding.stop_ids

    def _drop_finished(self) -> None:
        """Remove finished rows if they are at least half of the batch, or if the cache is full or does not exist."""
        active = [index for index, row in enumerate(self._rows) if not self._is_done[row]]
        is_full = self._cache is None or self._cache.filled == self._cache.length
        if 2 * len(active) <= len(self._rows) or is_full:
            self._rows = [self._rows[index] for index in active]
            if self._cache is not None and self._rows:
                self._cache.keep(torch.tensor(active, device=self._device))
