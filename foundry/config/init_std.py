"""Standard deviation of initial weights: a number, or a rule that depends on the hidden size."""

import math
from collections.abc import Callable

from foundry.core.errors import as_text, nearest

STD_RULES: dict[str, Callable[[int], float]] = {
    "small": lambda hidden_size: math.sqrt(2 / (5 * hidden_size)),
    "wang": lambda hidden_size: math.sqrt(1 / (3 * hidden_size)),
}
"""Rules by name: `small` of Nguyen and Salazar, 2019 ("Transformers without Tears", SmallInit), and `wang` of
Smith et al., 2022 ("Using DeepSpeed and Megatron to train Megatron-Turing NLG 530B")."""


def parse_std(text: str) -> float | Callable[[int], float]:
    """Parse a standard deviation: a number, or the name of a rule that computes it from the hidden size.

    Raises:
        ValueError: if the text is not a finite number above 0 and not the name of a rule.
    """
    if text in STD_RULES:
        return STD_RULES[text]
    try:
        std = float(text)
    except ValueError:
        std = math.nan
    if not 0 < std < math.inf:
        raise ValueError(
            f"is {as_text(text)} but must be a number above 0, or {' or '.join(STD_RULES)}{nearest(text, STD_RULES)}"
        )
    return std
