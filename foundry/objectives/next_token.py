"""Cross-entropy of the next token: pre-training."""

from typing import Any

import torch
from torch import Tensor, nn

from foundry.config.errors import ConfigError, Violation
from foundry.models.token_log_probs import IGNORED_TARGET
from foundry.objectives.text_samples import TextSamples, sample_token
from foundry.training.protocols import LossSum, Mean, Microbatch

DEFAULT_PROMPT = "def "


class NextToken:
    """Cross-entropy of the next token, with an optional z-loss (PaLM, Chowdhery et al., 2022, section 5).

    A microbatch holds `tokens` and `targets`: (batch, seq) int64, targets -100 where ignored, and `position`. The
    model maps (tokens, targets) to `TokenLogProbs`.

    Args:
        z_loss_coefficient: weight of the squared log-sum-exp of the logits, averaged over the same valid tokens.
        sample_tokens: length of a text sample in tokens.
        temperature: of a text sample; 0 picks the likeliest token.
    """

    def __init__(self, *, z_loss_coefficient: float = 0.0, sample_tokens: int = 160, temperature: float = 0.8) -> None:
        self.z_loss_coefficient = z_loss_coefficient
        self.sample_tokens = sample_tokens
        self.temperature = temperature

    @property
    def metrics(self) -> tuple[str, ...]:
        """What is measured besides the loss."""
        return ("cross_entropy", "z_loss") if self.z_loss_coefficient else ()

    def num_valid(self, microbatch: Microbatch) -> int:
        """Number of targets that are not ignored, in samples that are not padding."""
        return int((valid_targets(microbatch) != IGNORED_TARGET).sum())

    def loss(self, model: nn.Module, microbatch: Microbatch) -> LossSum:
        """Sum over the valid tokens of cross-entropy + z_loss_coefficient x logsumexp².

        With a z-loss, its sum (weighted) and that of the cross-entropy are metrics too.
        """
        targets = valid_targets(microbatch)
        output = model(microbatch["tokens"], targets)
        cross_entropy = -output.log_prob.sum()
        if self.z_loss_coefficient == 0:
            return LossSum(cross_entropy)
        squares = output.logsumexp.square().masked_fill(targets == IGNORED_TARGET, 0.0)
        z_loss = self.z_loss_coefficient * squares.sum()
        metrics = {"cross_entropy": Mean(cross_entropy.detach()), "z_loss": Mean(z_loss.detach())}
        return LossSum(cross_entropy + z_loss, metrics)

    @torch.no_grad()
    def generate(
        self,
        model: nn.Module,
        data: Any,
        device: Any,
        *,
        prompt: str | None = None,
        num_tokens: int | None = None,
        temperature: float | None = None,
        seed: int = 0,
    ) -> TextSamples:
        """Continue a prompt.

        Every rank calls this together: only the root module's forward pass runs, as often on all ranks. Tokens are
        drawn on the host with one seed, so all ranks get the same text. There is no key-value cache: 160 tokens cost
        160 forward passes of one sequence.

        Args:
            model: the model, wrapped or not; its training mode is restored.
            data: `DataSplits` of text; gives the tokenizer and the context length.
            device: where the model computes.
            prompt: text to continue; None: `def `.
            num_tokens: tokens to add at most, the text ends with its document; None: `sample_tokens`.
            temperature: None: the objective's own.
            seed: of the drawing.

        Raises:
            ConfigError: the prompt has no tokens.
        """
        prompt = DEFAULT_PROMPT if prompt is None else prompt
        temperature = self.temperature if temperature is None else temperature
        special = [token for token, added in data.tokenizer.get_added_tokens_decoder().items() if added.special]
        # Without a prompt the text starts where documents do: after the end of another.
        tokens: list[int] = data.tokenizer.encode(prompt, add_special_tokens=False).ids or special[:1]
        if not tokens:
            message = f"is {prompt!r}, of which the tokenizer makes no token; give a text that it knows"
            raise ConfigError(Violation("prompt", message))
        prompt_length = len(tokens)
        generator = torch.Generator().manual_seed(seed)
        was_training = model.training
        model.eval()
        for _ in range(self.sample_tokens if num_tokens is None else num_tokens):
            context = torch.tensor([tokens[-data.tokens_per_sample :]], device=device)
            tokens.append(sample_token(model(context, return_logits=True).logits[0, -1], temperature, generator))
        model.train(was_training)
        # Not earlier: a rank that stopped at the end of a document would leave the others waiting.
        added = tokens[prompt_length:]
        end = next((index for index, token in enumerate(added) if token in special), len(added))
        text = data.tokenizer.decode(tokens[: prompt_length + end])
        return TextSamples(prompt, text)


def valid_targets(microbatch: Microbatch) -> Tensor:
    """Targets, (batch, seq) int64, with those of padding samples ignored."""
    targets, is_padding = microbatch["targets"], microbatch["position"] < 0
    if not bool(is_padding.any()):  # in host memory, so nothing waits for the device
        return targets
    return targets.masked_fill(is_padding.to(targets.device, non_blocking=True)[:, None], IGNORED_TARGET)
