"""Language models whose `forward()` returns logits, called like a model that answers with log-probabilities."""

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
    """Let a model that returns logits, (batch, seq, vocab), be called as one that returns `TokenLogProbs`.

    The model's `forward` is replaced by a `LogitsForward`, so that the log-probabilities are computed within the root
    module under every strategy, and names of parameters stay as they are. `TokenLogProbs` are passed on unchanged.

    Args:
        model: not yet wrapped; changed in place.
        tile_tokens: positions whose log-probabilities are computed at a time, as in `read_log_probs`.
        vocab_size: entries of the data's vocabulary; a model may have more. None: unknown.

    Raises:
        ConfigError: `tile_tokens` is given, and the signature shows that the model computes log-probabilities itself.
    """
    model.forward = LogitsForward(model, tile_tokens=tile_tokens, vocab_size=vocab_size)


class LogitsForward:
    """The forward pass of a model, with log-probabilities computed from its logits.

    Its signature adds `targets`, `return_logits`, `read` and `per_token` to the model's own parameters. A model that
    takes `return_logits`, targets and any keyword, or any arguments at all, keeps its signature. Targets are passed on
    if the model's second positional parameter is required, or named after targets or labels.
    """

    def __init__(self, model: nn.Module, *, tile_tokens: int, vocab_size: int | None) -> None:
        self._forward: Callable[..., Any] = model.forward
        self._name, self._tile_tokens, self._vocab_size = type(model).__qualname__, tile_tokens, vocab_size
        signature = inspect.signature(model.forward)
        parameters = signature.parameters
        takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        positional = [parameter for parameter in parameters.values() if parameter.kind in _POSITIONAL]
        self._takes_targets = len(positional) > 1 and _is_for_targets(positional[1])
        takes_rest = any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters.values())
        self._keeps_call = "return_logits" in parameters or (takes_any and (self._takes_targets or takes_rest))
        self._taken = {name for name in _OWN_KEYWORDS if name in parameters}
        if self._keeps_call:
            self._refuse_tiles()
        self.__signature__ = signature if self._keeps_call else _extended(signature, 1 + self._takes_targets)

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
            targets: (batch, seq) int64, -100 where ignored; None: only the logits are returned.
            return_logits: also return the logits.
            read: see `read_log_probs`.
            per_token: see `read_log_probs`.
            options: keyword arguments that the model takes itself.

        Raises:
            ConfigError: the answer is not logits for every position, and not log-probabilities.
        """
        own = {"return_logits": return_logits, "read": read, "per_token": per_token}
        given = {name: value for name, value in own.items() if value and (self._keeps_call or name in self._taken)}
        has_targets = targets is not None and (self._keeps_call or self._takes_targets)
        answer = self._forward(tokens, *([targets] if has_targets else []), **given, **options)
        if hasattr(answer, "log_prob"):
            self._check_log_probs(answer, targets, {name for name, value in own.items() if value} - set(given))
            return answer  # type: ignore[no-any-return]
        self._check_logits(answer, tokens)
        asked: dict[str, Any] = {"return_logits": return_logits, "read": read, "per_token": per_token}
        return read_log_probs(answer, targets, tile_tokens=self._tile_tokens, **asked)

    def _check_log_probs(self, answer: Any, targets: Tensor | None, not_given: set[str]) -> None:
        """Refuse log-probabilities that ignore a requested tile size or argument."""
        if targets is not None and answer.log_prob.shape != targets.shape:
            not_given = {"targets"} | not_given
        self._refuse_tiles()
        if not_given:
            message = f"forward() returns log-probabilities and does not take {' and '.join(sorted(not_given))}"
            raise ConfigError(
                Violation("model", f"is {self._name}, whose {message}; add it, and pass it on to read_log_probs")
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
        """Refuse anything but logits for each position of the tokens."""
        batch, seq = tokens.shape
        if isinstance(answer, Tensor) and answer.dim() == 3 and answer.shape[:2] == tokens.shape:
            if self._vocab_size is None or answer.shape[-1] >= self._vocab_size:
                return
            message = f"logits of {answer.shape[-1]} tokens, fewer than data.vocab_size={self._vocab_size}"
            remedy = "give the model that many, such as vocab_size: ${data.vocab_size}"
        else:
            message = f"{_described(answer)} for tokens of shape ({batch}, {seq})"
            remedy = f"return logits alone, ({batch}, {seq}, vocab), before softmax and loss"
        raise ConfigError(Violation("model", f"is {self._name}, whose forward() returns {message}; {remedy}"))


def _is_for_targets(parameter: inspect.Parameter) -> bool:
    """Whether targets are passed by a model's second positional parameter."""
    is_required = parameter.default is parameter.empty
    return is_required or any(name in parameter.name.lower() for name in _TARGET_NAMES)


def _extended(signature: inspect.Signature, num_positional: int) -> inspect.Signature:
    """Return a model's signature with foundry's keywords; its first parameters become tokens and targets."""
    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    first = [inspect.Parameter("tokens", positional), inspect.Parameter("targets", positional, default=None)]
    own = [p for p in list(signature.parameters.values())[num_positional:] if p.kind in (positional, keyword)]
    kept = {p.name: p.replace(kind=keyword) for p in own if p.name not in ("tokens", "targets")}
    added = {name: inspect.Parameter(name, keyword, default=None) for name in _OWN_KEYWORDS}
    return inspect.Signature([*first, *{**added, **kept}.values()])


def _described(answer: Any) -> str:
    """An answer in a few words: its type, and shapes of tensors."""
    if isinstance(answer, Tensor):
        return "a scalar" if answer.dim() == 0 else f"a tensor of shape {tuple(answer.shape)}"
    if isinstance(answer, tuple) and answer:
        return f"a tuple ({', '.join(map(_described, answer))})"
    return "None" if answer is None else f"an object of type {type(answer).__name__}"
