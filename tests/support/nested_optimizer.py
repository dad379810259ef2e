"""An optimizer with nested state and with a running estimate in each parameter group."""

import torch
from torch.optim import Optimizer


class Nested(Optimizer):
    """Updates depend on values in nested dicts and lists of the state, which has other kinds of values as well."""

    def __init__(self, params, lr=0.1, *, only_shaped=False):
        super().__init__(params, {"lr": lr, "estimate": 1.0, "scale": None})
        self.only_shaped = only_shaped

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            if group["scale"] is None:
                group["scale"], group["seen"] = torch.tensor(1.0), [0, "text"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p].setdefault(0, self._fresh(p))
                state["sums"][0].add_(p.grad)
                state["sums"][1]["square"].mul_(0.9).addcmul_(p.grad, p.grad)
                state["count"] += 1
                state["rate"] = state["rate"] * 0.7
                factor = group["lr"] * state["rate"] * group["estimate"] * group["scale"].item()
                p.addcdiv_(state["sums"][0], state["sums"][1]["square"].sqrt() + 1, value=-factor / state["count"])
                if not self.only_shaped:
                    state["by row"][1].add_(p.grad.sum() * torch.tensor([1.0, 2.0]))
                    p.add_(state["by row"][1].sum(), alpha=1e-3)
            group["estimate"] *= 1.1
            group["scale"] *= 0.9
            group["seen"][0] += 1

    def _fresh(self, p):
        state = {
            "sums": [torch.zeros_like(p), {"square": torch.ones_like(p)}],
            "count": 0,
            "rate": 1.0,
            "worst": float("nan"),
            "nothing": None,
            "flags": (True, "text", ()),
            1: {"a.b": torch.zeros((), dtype=torch.int64), "1": torch.tensor(2.0)},
            "1": torch.tensor(3.0),
        }
        return state if self.only_shaped else state | {"by row": (None, torch.zeros(2))}


class Unsaved(Nested):
    """Keeps state that a checkpoint cannot store."""

    def _fresh(self, p):
        return super()._fresh(p) | {"history": [object()]}


def build_nested(*, model, lr, **settings):
    """Target of `optimizer` that accepts and ignores the settings of any option."""
    return [Nested(model.parameters(), lr, only_shaped=True)]


def build_unsaved(*, model, lr, **settings):
    return [Unsaved(model.parameters(), lr)]
