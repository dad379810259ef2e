"""Maximal update parametrization (muP): initial weights and learning rates as functions of the width.

With muP the best learning rate of a narrow model is also close to the best one of a wide model (Yang et al., 2022,
arXiv:2203.03466, "Tensor Programs V"). A model of the base width is the same with and without muP. With r = width /
base width, the rules for a wider or narrower model are

| role | initial weights | AdamW, learning rate | Muon, learning rate |
|---|---|---|---|
| input | x 1 | x 1 | x 1 |
| hidden | x 1 / sqrt(r) | x 1 / r | x 1 / sqrt(r) |
| output | x 1 / r | x 1 / r | x 1 / r |
| vector | x 1 | x 1 | |

for models whose other widths (feed-forward, heads at a fixed head size) are proportional to the width.

- AdamW follows Table 3 of Tensor Programs V, relative to the base width. Nothing is multiplied in the
  forward pass, so checkpoints and exports need no factors.
- The rules of Muon follow from the spectral condition (Yang, Simon and Bernstein, 2023, arXiv:2310.17813, condition 1):
  the spectral norm of an update must be proportional to sqrt(fan_out / fan_in). The update of `foundry.optim.muon` is
  lr x 0.2 x sqrt(max(fan_out, fan_in)) x O with a spectral norm of O near 1. For hidden matrices the condition asks for
  a constant, and the update grows as sqrt(r); for outputs it asks for 1 / sqrt(r), and the update grows as sqrt(r); for
  inputs both grow as sqrt(r).
- The attention scale 1 / sqrt(head size) is a constant at a fixed head size. Tensor Programs V scales by 1 / head size
  for models that are widened by larger heads, which these rules do not cover.
- If the output matrix is the token embedding, the embedding has the role of an input, and the weight of the last norm
  has the role of an output. This equals the output multiplier of Table 8: the logits are the product of both.
- Decoupled weight decay multiplies weights by 1 - lr x weight_decay. The product stays the same at every width, as Wang
  and Aitchison (2024, arXiv:2405.13698) find for AdamW with muP, so weight decay is divided by the factor of the
  learning rate.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum

from torch import nn

from foundry.models.keyed_draws import Constant, Draw, Normal, Uniform


class Role(Enum):
    """Which sizes of a parameter grow with the width of the model.

    Attributes:
        input: the number of outputs, as in embeddings.
        hidden: the numbers of inputs and of outputs.
        output: the number of inputs, as in the output head.
        vector: a bias, a norm, a scalar, or a parameter of a part whose sizes are constant.
    """

    input = "input"
    hidden = "hidden"
    output = "output"
    vector = "vector"


class UpdateRule(Enum):
    """Kind of an optimizer's update: elements of constant size (Adam), or constant singular values (Muon)."""

    adam = "adam"
    muon = "muon"


_INITIAL = {Role.hidden: -0.5, Role.output: -1.0}
"""Powers of width / base width that multiply initial values; 0 for other roles."""
_RATES = {
    UpdateRule.adam: {Role.hidden: -1.0, Role.output: -1.0},
    UpdateRule.muon: {Role.hidden: -0.5, Role.output: -1.0},
}
"""Powers of width / base width that multiply learning rates."""


@dataclass(frozen=True)
class WidthRules:
    """Factors on the initial values and learning rates of a model's parameters, relative to the base width.

    Attributes:
        ratio: width / base width; 1 for the standard parametrization, with factors of exactly 1.
        roles: roles by parameter name; other parameters are vectors.
    """

    ratio: float = 1.0
    roles: Mapping[str, Role] = field(default_factory=dict)

    def role(self, name: str) -> Role:
        """Return the role of a parameter."""
        return self.roles.get(name, Role.vector)

    def initial_factor(self, name: str) -> float:
        """Return the factor on the initial values of a parameter."""
        return float(self.ratio ** _INITIAL.get(self.role(name), 0.0))

    def lr_factor(self, name: str, update: UpdateRule) -> float:
        """Return the factor on the learning rate of a parameter under an optimizer with this kind of update."""
        return float(self.ratio ** _RATES[update].get(self.role(name), 0.0))

    def base_fans(self, name: str, fan_in: int, fan_out: int) -> tuple[float, float]:
        """Return the numbers of inputs and outputs of a matrix in a model of the base width, which may be fractions."""
        role = self.role(name)
        base_in = fan_in / self.ratio if role in (Role.hidden, Role.output) else float(fan_in)
        return base_in, fan_out / self.ratio if role in (Role.hidden, Role.input) else float(fan_out)

    def scale(self, draws: Mapping[str, Draw]) -> dict[str, Draw]:
        """Return the initialization of this model by parameter name, given that of a model of the base width."""
        return {name: _scaled(draw, self.initial_factor(name)) for name, draw in draws.items()}


def find_roles(model: nn.Module, *, inputs: Collection[str] = (), outputs: Collection[str] = ()) -> dict[str, Role]:
    """Return the roles of the weights of embeddings and linear layers by parameter name.

    Embeddings are inputs. Linear layers are hidden, except for those named in `inputs` and `outputs`.

    Args:
        model: the unwrapped model, without adapters.
        inputs: names of linear layers whose number of inputs is constant.
        outputs: names of linear layers whose number of outputs is constant.
    """
    roles = dict[str, Role]()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            roles[f"{name}.weight"] = Role.input
        elif isinstance(module, nn.Linear):
            role = Role.input if name in inputs else Role.output if name in outputs else Role.hidden
            roles[f"{name}.weight"] = role
    return roles


def _scaled(draw: Draw, factor: float) -> Draw:
    match draw:
        case Normal(std, zero_row):
            return Normal(std * factor, zero_row)
        case Uniform(bound):
            return Uniform(bound * factor)
        case Constant(value):
            return Constant(value * factor)
