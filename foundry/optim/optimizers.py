"""PyTorch's optimizers and Muon, with common parameter groups.

`adamw`, `adam`, `sgd` and `muon` take the wrapped model and return optimizers that together cover its trainable
parameters. Parameter groups have `lr_mult` and `wd_mult`, which scale the values of the schedule.
"""

import re
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import asdict
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from foundry.config.configured import configured_by
from foundry.config.schemas.optimizer import SGD as SGDSettings
from foundry.config.schemas.optimizer import Adam as AdamSettings
from foundry.config.schemas.optimizer import AdamW as AdamWSettings
from foundry.config.schemas.optimizer import Muon as MuonSettings
from foundry.config.schemas.optimizer import NsDtype
from foundry.config.schemas.optimizer import Optimizer as OptimizerSettings
from foundry.config.schemas.precision import PrecisionMode
from foundry.core.errors import ConfigError, Violation, counted, listed
from foundry.core.model_hooks import hook
from foundry.core.sharded import is_sharded
from foundry.models.fsdp_block import find_blocks
from foundry.models.parametrization import UpdateRule, WidthRules
from foundry.optim.adamw_bf16 import Bf16AdamW
from foundry.optim.adamw_cautious import CautiousAdamW, CautiousBf16AdamW
from foundry.optim.eager import Adam, AdamW
from foundry.optim.muon import Muon
from foundry.optim.sgd import ShardedSGD

Groups = Mapping[str, Any]
_NS_DTYPES = {NsDtype.fp32: torch.float32, NsDtype.bf16: torch.bfloat16}


@runtime_checkable
class HasHead(Protocol):
    """A model that declares its output head."""

    def output_head(self) -> nn.Module | None:
        """Return the head; None if the head is tied to the embedding."""
        ...


@configured_by(AdamWSettings)
def adamw(settings: AdamWSettings, *, model: nn.Module, lr: float) -> list[Optimizer]:
    """AdamW (Loshchilov and Hutter, 2019); moments are stored in the dtype of the parameters, or in `moments_dtype`."""
    kind: type[AdamW] = AdamW if settings.moments_dtype is None else Bf16AdamW
    if settings.cautious_weight_decay:
        kind = CautiousAdamW if settings.moments_dtype is None else CautiousBf16AdamW
    return [kind(_groups(model, settings), **_moments(model, settings), lr=lr)]


@configured_by(AdamSettings)
def adam(settings: AdamSettings, *, model: nn.Module, lr: float) -> list[Optimizer]:
    """Adam (Kingma and Ba, 2015); weight decay is an L2 term in the gradient."""
    return [Adam(_groups(model, settings), **_moments(model, settings), lr=lr)]


@configured_by(SGDSettings)
def sgd(settings: SGDSettings, *, model: nn.Module, lr: float) -> list[Optimizer]:
    """Stochastic gradient descent with momentum."""
    options: dict[str, Any] = {"momentum": settings.momentum, "nesterov": settings.nesterov, "fused": _fused(model)}
    return [ShardedSGD(_groups(model, settings), lr=lr, **options)]


@configured_by(MuonSettings)
def muon(
    settings: MuonSettings, *, model: nn.Module, lr: float, precision: PrecisionMode = PrecisionMode.amp_bfloat16
) -> list[Optimizer]:
    """Muon (Jordan et al., 2024) for the matrices inside blocks, AdamW for all other parameters.

    Muon's updates are scaled to the RMS of AdamW's updates (Liu et al., 2025), so that both use `lr`. If `ns_dtype` is
    None, the iteration runs in bf16 if `precision` multiplies matrices in bf16, and otherwise in fp32.
    `foundry.models.parametrization` derives the factors on the rates of models with `parametrization=mup`.
    """
    matrices = {p for block in find_blocks(model) for p in block.parameters() if p.requires_grad and p.ndim == 2}
    muon_groups = _groups(model, settings, include=matrices, update=UpdateRule.muon)
    other_groups = _groups(model, settings, include={p for p in model.parameters() if p not in matrices})
    kind = CautiousAdamW if settings.cautious_weight_decay else AdamW
    optimizers: list[Optimizer] = [kind(other_groups, **_moments(model, settings), lr=lr)]
    if muon_groups:
        ns_dtype = NsDtype.following(precision) if settings.ns_dtype is None else settings.ns_dtype
        orthogonal = Muon(
            muon_groups,
            lr=lr,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            ns_steps=settings.ns_steps,
            ns_dtype=_NS_DTYPES[NsDtype(ns_dtype)],
            weight_decay=settings.weight_decay,
            cautious_weight_decay=settings.cautious_weight_decay,
            row_variance_decay=settings.row_variance_decay if settings.row_variance else None,
            # DDP has reduced the gradients already: all ranks hold the same values, and each can process a share of the
            # matrices.
            group=model.process_group if isinstance(model, DistributedDataParallel) else None,
        )
        optimizers.insert(0, orthogonal)
    return optimizers


def _groups(
    model: nn.Module,
    settings: OptimizerSettings,
    include: Set[nn.Parameter] | None = None,
    update: UpdateRule = UpdateRule.adam,
) -> list[dict[str, Any]]:
    betas = None
    if isinstance(settings, AdamSettings | MuonSettings) and update is UpdateRule.adam:
        betas = settings.beta1, settings.beta2
    groups = asdict(settings.groups)
    return param_groups(model, settings.weight_decay, groups, include=include, update=update, betas=betas)


def _moments(model: nn.Module, settings: AdamSettings | MuonSettings) -> dict[str, Any]:
    """Return `betas`, `eps` and `fused` as keyword arguments for torch's Adam and AdamW."""
    return {"betas": (settings.beta1, settings.beta2), "eps": settings.eps, "fused": _fused(model)}


def param_groups(
    model: nn.Module,
    weight_decay: float,
    groups: Groups | None = None,
    *,
    include: Set[nn.Parameter] | None = None,
    update: UpdateRule = UpdateRule.adam,
    betas: tuple[float, float] | None = None,
) -> list[dict[str, Any]]:
    """Split trainable parameters into parameter groups.

    Weight decay applies to matrices, and to biases, norms and other vectors only if a group sets `wd_mult`. Sharded and
    unsharded parameters are in separate groups, because a fused kernel accepts only one kind at a time.

    If the model's `width_rules` scale the learning rate of a parameter, `lr_mult` has this factor and `wd_mult` its
    inverse, so that the product of learning rate and weight decay does not depend on the width.

    Args:
        model: the wrapped model.
        weight_decay: weight decay of parameters with `wd_mult` 1.
        groups: the fields of `foundry.config.schemas.optimizer.ParamGroups`.
        include: parameters to include; None includes all.
        update: kind of the optimizer's update, which determines the learning rates of `width_rules`.
        betas: default decay rates of the moments of Adam and AdamW; None for other optimizers.

    Raises:
        ConfigError: a group matches no trainable parameter, two groups match the same parameter, or a group sets a
            decay of a parameter whose optimizer has no moments.
    """
    assignment, rules = _assign(model, groups or {}), _width_rules(model)
    members: dict[tuple[float, float, tuple[float, ...], bool], list[nn.Parameter]] = {}
    for name, parameter in _inner(model).named_parameters():
        if parameter.requires_grad and (include is None or parameter in include):
            group_name, group = assignment.get(parameter, ("", {}))
            wd_mult = group.get("wd_mult")
            if wd_mult is None:
                wd_mult = 0.0 if parameter.ndim < 2 else 1.0
            factor = rules.lr_factor(name, update)
            key = (
                float(group.get("lr_mult", 1.0)) * factor,
                float(wd_mult) / factor,
                _betas(betas, group, f"optimizer.groups.{group_name}", name),
                is_sharded(parameter),
            )
            members.setdefault(key, []).append(parameter)
    return [
        {
            "params": params,
            "weight_decay": weight_decay * wd_mult,
            "lr_mult": lr_mult,
            "wd_mult": wd_mult,
            **({"betas": decays} if decays else {}),
        }
        for (lr_mult, wd_mult, decays, _), params in sorted(
            members.items(), key=lambda item: (item[0][1] == 0, item[0])
        )
    ]


def _betas(
    defaults: tuple[float, float] | None, group: Mapping[str, Any], key: str, parameter_name: str
) -> tuple[float, ...]:
    """Return the decays of the moments of a parameter; an empty tuple for an optimizer without moments."""
    given = {name: group[name] for name in ("beta1", "beta2") if group.get(name) is not None}
    if defaults is not None:
        return float(given.get("beta1", defaults[0])), float(given.get("beta2", defaults[1]))
    for name, value in given.items():
        message = f"is {value:g} but the group holds {parameter_name}, which AdamW does not update; narrow the group"
        raise ConfigError(Violation(f"{key}.{name}", message))
    return ()


def _inner(model: nn.Module) -> nn.Module:
    """Return the model without DDP, the only wrapper that changes parameter names."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _width_rules(model: nn.Module) -> WidthRules:
    rules = hook(_inner(model), "width_rules")
    return WidthRules() if rules is None else rules()


def find_coverage_problem(optimizers: object, model: nn.Module) -> str | None:
    """Explain why optimizers do not fit a model; None if they contain each trainable parameter exactly once.

    Args:
        optimizers: return value of the user's optimizer function.
        model: the wrapped model.
    """
    if not isinstance(optimizers, (list, tuple)):
        remedy = "return [optimizer]" if isinstance(optimizers, Optimizer) else "return [torch.optim.AdamW(...)]"
        return f"returns {_kind(optimizers)}, not a list of optimizers; {remedy}"
    if invalid := [optimizer for optimizer in optimizers if not isinstance(optimizer, Optimizer)]:
        return f"returns a list with {_kind(invalid[0])}, which is not a torch.optim.Optimizer"
    grouped = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    names = {p: name for name, p in model.named_parameters()}
    counts = Counter(map(id, grouped))
    if duplicates := [name for p, name in names.items() if counts[id(p)] > 1]:
        return f"takes {listed(duplicates, 3)} more than once; give each parameter to one group of one optimizer"
    trainable = [name for p, name in names.items() if p.requires_grad]
    if missing := [name for p, name in names.items() if p.requires_grad and not counts[id(p)]]:
        text = f"leaves out {len(missing)} of {len(trainable)} trainable parameters: {listed(missing, 3)}"
        return f"{text}; add them to a group, or freeze them in the model with requires_grad_(False)"
    if num_unknown := sum(p not in names for p in grouped):
        number = counted(num_unknown, "tensor")
        return f"takes {number} not among the parameters of the given model; use model.parameters()"
    return None


def _kind(value: object) -> str:
    return "nothing" if value is None else f"an object of type {type(value).__name__}"


def _assign(model: nn.Module, groups: Groups) -> dict[nn.Parameter, tuple[str, Mapping[str, Any]]]:
    """Map parameters to the names and settings of their groups.

    The group of embeddings or of the head is left out if it has default values.
    """
    named_groups = {
        **{name: groups[name] for name in ("embeddings", "head") if not _is_neutral(groups.get(name, {}))},
        **{f"patterns.{name}": group for name, group in groups.get("patterns", {}).items()},
    }
    assignment: dict[nn.Parameter, tuple[str, Mapping[str, Any]]] = {}
    for name, group in named_groups.items():
        group_members, match = _members(model, name, group.get("match")), group.get("match")
        if not group_members:
            reason = f"no trainable parameter matches {match!r}" if match else f"the model has no separate {name}"
            raise ConfigError(Violation(f"optimizer.groups.{name}", f"is given but {reason}"))
        for parameter_name, parameter in group_members:
            if parameter in assignment:
                other = assignment[parameter][0]
                raise ConfigError(Violation(f"optimizer.groups.{name}", f"and {other} both hold {parameter_name}"))
            assignment[parameter] = name, group
    return assignment


def _is_neutral(group: Mapping[str, Any]) -> bool:
    return group.get("lr_mult", 1.0) == 1.0 and all(group.get(key) is None for key in ("wd_mult", "beta1", "beta2"))


def _members(model: nn.Module, name: str, match: str | None) -> list[tuple[str, nn.Parameter]]:
    # Names without DDP, so that a pattern means the same for any number of ranks.
    parameters = [(n, p) for n, p in _inner(model).named_parameters() if p.requires_grad]
    embeddings = {p for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    if match is not None:
        return [(n, p) for n, p in parameters if re.search(match, n)]
    if name == "embeddings":
        return [(n, p) for n, p in parameters if p in embeddings]
    heads = [module.output_head() for module in model.modules() if isinstance(module, HasHead)]
    return [
        (n, p) for head in heads if head is not None for n, p in parameters if p in {*head.parameters()} - embeddings
    ]


def _fused(model: nn.Module) -> bool:
    """Return whether the fused kernel supports all parameters: floating point, on a CPU or a GPU."""
    return all(p.device.type in ("cpu", "cuda") and torch.is_floating_point(p) for p in model.parameters())
