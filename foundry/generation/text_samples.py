"""Text samples: continuations of prompts, for users to read."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from foundry.core.errors import ConfigError, Violation
from foundry.generation.decoding import Continuation, Decoding, generate
from foundry.generation.picture_answers import PictureAnswers
from foundry.run_dir.files import write_atomically

DEFAULT_PROMPT = "def "
log = logging.getLogger(__name__)
_SHOWN, _PICTURES_SHOWN = 4, 8
"""Numbers of held-out prompts to continue if the user gives none: for text models, and for vision models."""
_PAGE_WIDTH = 60
"""Characters of a heading in a file of samples."""


@dataclass(frozen=True)
class TextSamples:
    """Prompts with their continuations by a model.

    Attributes:
        texts: each prompt with its continuation.
        prompts: the prompt at the start of each text; empty if unknown.
        sampling: sampling settings by name: temperature, seed.
        step: number of optimizer steps of the model; None if unknown.
    """

    texts: tuple[str, ...]
    prompts: tuple[str, ...] = ()
    sampling: Mapping[str, object] = field(default_factory=dict)
    step: int | None = None

    @property
    def text(self) -> str:
        """All texts, separated by empty lines."""
        return "\n\n".join(self.texts)

    @property
    def page(self) -> str:
        """All texts under headings: step and sampling settings, then number, prompt and continuation of each text."""
        facts = {**({} if self.step is None else {"step": self.step}), **self.sampling}
        blocks = [", ".join(f"{name} {value}" for name, value in facts.items())] if facts else []
        for number, text in enumerate(self.texts, start=1):
            prompt = self.prompts[number - 1] if self.prompts else ""
            parts = [_heading(f"sample {number} of {len(self.texts)}", "=")]
            parts += [_heading("prompt", "-"), prompt] if self.prompts else []
            parts += [_heading("continuation", "-"), text.removeprefix(prompt)]
            blocks.append("\n".join(parts))
        return "\n\n".join(blocks)

    def save(self, stem: Path) -> Path:
        """Write `stem`.txt and return its path."""
        file = Path(f"{stem}.txt")
        write_atomically(file, self.page + "\n")
        return file


def _heading(title: str, sign: str) -> str:
    return f"{3 * sign} {title} ".ljust(_PAGE_WIDTH, sign)


@dataclass(frozen=True)
class _Input:
    """A prompt: token ids, start of the last user turn, reference answer (or None) and images."""

    tokens: list[int]
    turn: int = 0
    answer: str | None = None
    images: Tensor | None = None


def continue_text(
    model: nn.Module,
    data: Any,
    device: Any,
    *,
    prompt: str | None = None,
    prompts: Sequence[str] | None = None,
    max_new_tokens: int = 160,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float = 1.0,
    stop: Sequence[str] | None = None,
    chat: bool = True,
    image: Tensor | None = None,
    seed: int = 0,
) -> TextSamples | PictureAnswers:
    """Continue prompts as text, or answer them in a chat; with a vision model, answer questions about an image.

    All ranks must call this together. They run the model's forward pass equally often, and all get the same text.

    Args:
        model: the model, wrapped or not; its training mode is restored.
        data: `DataSplits` of text, with the tokenizer, the stop tokens and the chat template.
        device: device of the model.
        prompt: text to continue; None for `prompts`, else the first few held-out prompts, else `def `.
        prompts: several texts to continue.
        max_new_tokens: maximum number of generated tokens; a text ends earlier at the end of its document or answer.
        temperature: sampling temperature; 0 for greedy decoding.
        top_k: number of most probable tokens to sample from; None for all.
        top_p: sample from the smallest set of tokens whose probabilities sum to this value.
        stop: tokens that end a text; None for the data's stop tokens, or all special tokens if the data has none.
        chat: format prompts with the data's chat template, if it has one.
        image: image for the prompts, (3, image_size, image_size) uint8; None for text models, or to use held-out
            prompts with their own images.
        seed: seed of the sampling.

    Raises:
        ConfigError: `prompt` and `prompts` are both set or are needed but missing, a prompt has no tokens, the template
            rejects it, `stop` contains an unknown token, or a vision model gets no image.
    """
    special = [token for token, added in data.tokenizer.get_added_tokens_decoder().items() if added.special]
    stop_ids = list(data.stop_ids) or special
    reads_images = getattr(getattr(model, "module", model), "image_size", None) is not None
    if prompt is None and prompts is None and image is None and chat and data.prompts:
        inputs = _held_out_inputs(data, reads_images=reads_images)
    elif reads_images and image is None:
        raise ConfigError(Violation("image", "has no value, but the model requires an image; give image=FILE"))
    else:
        texts = _resolve_prompts(prompt, prompts, data, chat=chat)
        inputs = _encode(texts, data, image, stop_ids, chat=chat)
    encoded = [item.tokens for item in inputs]
    if not all(encoded):
        message = "has a text that the tokenizer encodes to no tokens; give another text"
        raise ConfigError(Violation("prompt" if prompts is None else "prompts", message))
    decoding = Decoding(
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        stop_ids=frozenset(stop_ids if stop is None else _ids(data.tokenizer, stop)),
        seed=seed,
    )
    context = context_of(model, data)
    if (longest := max(map(len, encoded))) > context:
        log.warning("a prompt has %d tokens; the model reads only the last %d", longest, context)
    continuations = generate(
        model,
        encoded,
        decoding,
        context=context,
        device=torch.device(device),
        in_lockstep=dist.is_initialized() and dist.get_world_size() > 1,
        images=[item.images for item in inputs if item.images is not None] if reads_images else None,
    )
    if reads_images:
        return _picture_answers(inputs, continuations, data)
    return _text_samples(inputs, continuations, data, decoding)


def _held_out_inputs(data: Any, *, reads_images: bool) -> list[_Input]:
    """Return the first few held-out prompts."""
    shown = data.prompts[: _PICTURES_SHOWN if reads_images else _SHOWN]
    return [_Input(list(item.tokens), item.turn, item.answer, item.images) for item in shown]


def _text_samples(
    inputs: Sequence[_Input], continuations: Sequence[Continuation], data: Any, decoding: Decoding
) -> TextSamples:
    """Return each prompt with its continuation, and the sampling settings that differ from the defaults."""
    filters: dict[str, object] = {} if decoding.top_k is None else {"top_k": decoding.top_k}
    if decoding.top_p != 1.0:
        filters["top_p"] = decoding.top_p
    pairs = zip(inputs, continuations, strict=True)
    return TextSamples(
        texts=tuple(data.decode([*item.tokens, *continuation.answer]) for item, continuation in pairs),
        prompts=tuple(data.decode(item.tokens) for item in inputs),
        sampling={"temperature": decoding.temperature, "seed": decoding.seed, **filters},
    )


def _picture_answers(inputs: Sequence[_Input], continuations: Sequence[Continuation], data: Any) -> PictureAnswers:
    """Return each answer with the question, the reference answer and the first image of its prompt."""
    return PictureAnswers(
        images=torch.stack([item.images[0] for item in inputs if item.images is not None]),
        questions=tuple(" ".join(data.decode(item.tokens[item.turn :]).split()) for item in inputs),
        answers=tuple(data.decode(item.answer) for item in continuations),
        truths=tuple(item.answer for item in inputs),
    )


def context_of(model: nn.Module, data: Any) -> int:
    """Return the model's context length: its `max_seq_len`, or else the length of the longest sample."""
    lengths = (getattr(getattr(model, "module", model), "max_seq_len", None), data.max_tokens, data.tokens_per_sample)
    return int(next(length for length in lengths if length is not None))


def _resolve_prompts(prompt: str | None, prompts: Sequence[str] | None, data: Any, *, chat: bool) -> Sequence[str]:
    """Return the texts to continue.

    Raises:
        ConfigError: `prompt` and `prompts` are both set, `prompts` is empty, or neither is set for a chat.
    """
    if prompts is None:
        if prompt is None and chat and data.chat_template is not None:
            raise ConfigError(Violation("prompt", "has no value; give it as prompt=..., or chat=false for plain text"))
        return [DEFAULT_PROMPT if prompt is None else prompt]
    if prompt is not None:
        raise ConfigError(Violation("prompt", "is set together with prompts; choose one of them"))
    if not prompts:
        raise ConfigError(Violation("prompts", "is empty; give at least one text"))
    return prompts


def _encode(
    texts: Sequence[str], data: Any, image: Tensor | None, stop_ids: Sequence[int], *, chat: bool
) -> list[_Input]:
    """Return the inputs of texts, each with the image.

    An empty text becomes the first stop token: in training, each document follows the stop token of another.

    Raises:
        ConfigError: the chat template rejects a text.
    """
    images = None if image is None else image.unsqueeze(0)
    try:
        encoded = [data.encode_prompt(text, as_chat=chat) or list(stop_ids[:1]) for text in texts]
    except ValueError as error:
        raise ConfigError(Violation("prompt", str(error))) from None
    return [_Input(tokens, images=images) for tokens in encoded]


def _ids(tokenizer: Any, stop: Sequence[str]) -> list[int]:
    ids = {token: tokenizer.token_to_id(token) for token in stop}
    if unknown := [token for token, id in ids.items() if id is None]:
        raise ConfigError(Violation("stop", f"has {unknown[0]!r}, which is not a token of the tokenizer"))
    return list(ids.values())
