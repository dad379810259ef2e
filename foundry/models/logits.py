"""Adapter that lets language models whose `forward()` returns logits return log-probabilities instead."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from foundry.core.errors import ConfigError, Violation
from foundry.models.token_log_probs import Read, TokenLogProbs, read_log_probs

_OWN_KEYWORDS = ("return_logits", "read", "per_token")
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TARGET_NAMES = ("target", "label")


def answer_with_log_probs(model: nn.Module, *, tile_tokens: int = 0, vocab_size: int | None = None) -> None:
    """Make a model that returns logits, (batch, seq, vocab), return `TokenLogProbs` instead.

    The model's `forward` is replaced by a `LogitsForward`. Log-probabilities are therefore computed inside the root
    module under every distributed strategy, and parameter names do not change. If the model already returns
    `TokenLogProbs`, these outputs are passed through.

    Args:
        model: not yet wrapped; changed in place.
        tile_tokens: positions whose log-probabilities are computed at a time, as in `read_log_probs`.
        vocab_size: vocabulary size of the data, the minimum for the model's vocabulary; None skips this check.

    Raises:
        ConfigError: `tile_tokens` is not 0, but the signature shows that the model computes log-probabilities itself.
    """
    model.forward = LogitsForward(model, tile_tokens=tile_tokens, vocab_size=vocab_size)


class LogitsForward:
    """Forward pass of a model, followed by computing log-probabilities from its logits.

    The signature adds `targets`, `return_logits`, `read` and `per_token` to the parameters of the model. The signature
    is unchanged if the model takes `return_logits`, or arbitrary keyword arguments together with either targets or
    arbitrary positional arguments. Targets are passed to the model if its signature is unchanged, or if its second
    positional parameter is required or is named after targets or labels.
    """

    def __init__(self, model: nn.Module, *, tile_tokens: int, vocab_size: int | None) -> None:
        self._forward: Callable[..., Any] = model.forward
        self._name, self._tile_tokens, self._vocab_size = type(model).__qualname__, tile_tokens, vocab_size
        signature = inspect.signature(model.forward)
        parameters = signature.parameters
        accepts_keywords = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        positional = [parameter for parameter in parameters.values() if parameter.kind in _POSITIONAL]
        self._accepts_targets = len(positional) > 1 and _is_for_targets(positional[1])
        accepts_positional = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
        self._keeps_signature = "return_logits" in parameters or (
            accepts_keywords and (self._accepts_targets or accepts_positional)
        )
        self._accepted_keywords = {name for name in _OWN_KEYWORDS if name in parameters}
        if self._keeps_signature:
            self._refuse_tiles()
        self.__signature__ = (
            signature if self._keeps_signature else _extend_signature(signature, 1 + self._accepts_targets)
        )

    def __call__(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        return_logits: bool = False,
        read: Read | None = None,
        per_token: Sequence[Tensor] = (),
        **options: Any,
    ) -> TokenLogProbs:
        """Run the model.

        Args:
            tokens: (batch, seq) int64.
            targets: (batch, seq) int64, -100 where ignored; None returns only the logits.
            return_logits: also return the logits.
            read: see `read_log_probs`.
            per_token: see `read_log_probs`.
            options: keyword arguments passed to the model.

        Raises:
            ConfigError: the output is neither `TokenLogProbs` nor logits of all tokens for every position, or the model
                computes log-probabilities itself and does not take a requested argument.
        """
        arguments = {"return_logits": return_logits, "read": read, "per_token": per_token}
        accepted = {
            name: value
            for name, value in arguments.items()
            if value and (self._keeps_signature or name in self._accepted_keywords)
        }
        has_targets = targets is not None and (self._keeps_signature or self._accepts_targets)
        answer = self._forward(tokens, *([targets] if has_targets else []), **accepted, **options)
        if hasattr(answer, "log_prob"):
            self._check_log_probs(answer, targets, {name for name, value in arguments.items() if value} - set(accepted))
            return answer  # type: ignore[no-any-return]
        self._check_logits(answer, tokens)
        read_options: dict[str, Any] = {"return_logits": return_logits, "read": read, "per_token": per_token}
        return read_log_probs(answer, targets, tile_tokens=self._tile_tokens, **read_options)

    def _check_log_probs(self, answer: Any, targets: Tensor | None, missing: set[str]) -> None:
        """Raise a ConfigError if log-probabilities were computed without the requested tile size or arguments."""
        if targets is not None and answer.log_prob.shape != targets.shape:
            missing = {"targets"} | missing
        self._refuse_tiles()
        if missing:
            message = f"forward() returns log-probabilities and does not take {' and '.join(sorted(missing))}"
            raise ConfigError(
                Violation("model", f"is {self._name}, whose {message}; add it and pass it to read_log_probs")
            )

    def _refuse_tiles(self) -> None:
        if self._tile_tokens:
            message = (
                f"is {self._tile_tokens} but the model, {self._name}, computes log-probabilities itself and has no"
            )
            raise ConfigError(
                Violation("objective.logprob_chunk_size", f"{message} argument logprob_tile_tokens; set it to null")
            )

    def _check_logits(self, answer: Any, tokens: Tensor) -> None:
        """Raise a ConfigError unless the model returned logits of the data's whole vocabulary for each position."""
        batch, seq = tokens.shape
        if isinstance(answer, Tensor) and answer.dim() == 3 and answer.shape[:2] == tokens.shape:
            if self._vocab_size is None or answer.shape[-1] >= self._vocab_size:
                return
            message = f"logits of {answer.shape[-1]} tokens, fewer than data.vocab_size={self._vocab_size}"
            remedy = "give the model as many, for example with vocab_size: ${data.vocab_size}"
        else:
            message = f"{_describe(answer)} for tokens of shape ({batch}, {seq})"
            remedy = f"return only logits, ({batch}, {seq}, vocab), before softmax and loss"
        raise ConfigError(Violation("model", f"is {self._name}, whose forward() returns {message}; {remedy}"))


def _is_for_targets(parameter: inspect.Parameter) -> bool:
    """Return whether the second positional parameter of a model's forward() takes targets."""
    is_required = parameter.default is parameter.empty
    return is_required or any(name in parameter.name.lower() for name in _TARGET_NAMES)


def _extend_signature(signature: inspect.Signature, num_positional: int) -> inspect.Signature:
    """Return a model's signature with foundry's keyword arguments; its first parameters become tokens and targets."""
    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    first = [inspect.Parameter("tokens", positional), inspect.Parameter("targets", positional, default=None)]
    parameters = [p for p in list(signature.parameters.values())[num_positional:] if p.kind in (positional, keyword)]
    keywords = {p.name: p.replace(kind=keyword) for p in parameters if p.name not in ("tokens", "targets")}
    added = {name: inspect.Parameter(name, keyword, default=None) for name in _OWN_KEYWORDS}
    return inspect.Signature([*first, *{**added, **keywords}.values()])


def _describe(answer: Any) -> str:
    """Describe a model output by its type, and by shape for tensors."""
    if isinstance(answer, Tensor):
        return "a scalar" if answer.dim() == 0 else f"a tensor of shape {tuple(answer.shape)}"
    if isinstance(answer, tuple) and answer:
        return f"a tuple ({', '.join(map(_describe, answer))})"
    return "None" if answer is None else f"an object of type {type(answer).__name__}"
