"""Cost of the gradient of attention in bf16 on a CPU: foundry's and the kernel of torch, for several lengths.

Both take turns in one process, on the same 1,024 tokens of four heads of 64 numbers, with causal attention. The
milliseconds are of the backward pass. The error is the relative difference from gradients in float64, the largest of
queries, keys and values.

    OMP_NUM_THREADS=1 python benchmarks/attention.py [--repeats 50]
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from records import Column, Row, finish, parser
from torch import Tensor

from foundry.models.attention.kernel import attend
from foundry.parallel.malloc import keep_freed_memory

TOKENS, HEADS, HEAD_DIM, WARMUP = 1024, 4, 64, 5
LENGTHS = (16, 64, 256, 512)
COLUMNS = [
    Column(key="milliseconds", heading="ms", format=".2f", spread=True),
    Column(key="ratio", heading="times the kernel of torch", format=".2f"),
    Column(key="error", heading="error", format=".1e"),
]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def _torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _foundry(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend(query, key, value, is_causal=True)


SIDES: dict[str, Attention] = {"foundry": _foundry, "torch": _torch}


class Case:
    """Queries, keys, values and the gradient of the output for one length, and the exact gradients.

    Args:
        length: tokens of a sequence.
    """

    def __init__(self, length: int) -> None:
        shape = TOKENS // length, length, HEADS, HEAD_DIM
        *inputs, self.grad = (torch.randn(shape, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4))
        self.inputs = [tensor.requires_grad_() for tensor in inputs]
        exact = [tensor.detach().double().requires_grad_() for tensor in inputs]
        self.expected = torch.autograd.grad(_torch(*exact), exact, self.grad.double())
        self.outputs = {name: attention(*self.inputs) for name, attention in SIDES.items()}

    def differentiate(self, side: str) -> tuple[Tensor, ...]:
        """Return the gradients of queries, keys and values."""
        return torch.autograd.grad(self.outputs[side], self.inputs, self.grad, retain_graph=True)

    def error(self, side: str) -> float:
        """Return the largest relative error of the gradients."""
        pairs = zip(self.differentiate(side), self.expected, strict=True)
        return max(float((own.double() - exact).norm() / exact.norm()) for own, exact in pairs)


def main() -> None:
    """Measure both sides in turn for each length."""
    cli = parser(__doc__)
    cli.add_argument("--repeats", type=int, default=50, help="measured backward passes of each side and length")
    options = cli.parse_args()
    keep_freed_memory()
    torch.manual_seed(0)
    rows = list[Row]()
    for length in LENGTHS:
        case = Case(length)
        errors = {side: case.error(side) for side in SIDES}
        times = {side: list[float]() for side in SIDES}
        for number in range(1 if options.smoke else options.repeats + WARMUP):
            for side, measured in times.items():
                start = time.perf_counter()
                case.differentiate(side)
                if options.smoke or number >= WARMUP:
                    measured.append(1e3 * (time.perf_counter() - start))
        ratios = [own / other for own, other in zip(times["foundry"], times["torch"], strict=True)]
        for side, measured in times.items():
            values = {
                "milliseconds": measured,
                "ratio": ratios if side == "foundry" else None,
                "error": [errors[side]],
            }
            rows.append(Row(case=str(length), side=side, values=values))
    finish(options, case="tokens of a sequence", side="gradient", columns=COLUMNS, rows=rows)


if __name__ == "__main__":
    main()
