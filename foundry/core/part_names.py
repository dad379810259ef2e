"""Public names of foundry's own parts: `foundry.GRPO`, `foundry.schedules.Linear`.

Configurations use public names as `_target_`, and `from foundry import GRPO` imports a part. Public names stay the same
when modules move. Models, objectives, simulators and trackers are directly in `foundry`; other parts in a namespace:

| namespace | parts of | such as |
|---|---|---|
| `foundry` | `model`, `objective`, `simulator`, `tracking.trackers` | `foundry.GRPO` |
| `foundry.datasets` | `data` | `foundry.datasets.chat_files` |
| `foundry.evals` | `evaluation.evaluators` | `foundry.evals.ExactMatch` |
| `foundry.optimizers` | `optimizer` | `foundry.optimizers.adamw` |
| `foundry.rewards` | `environment` | `foundry.rewards.ExactMatch` |
| `foundry.schedules` | `scheduler` | `foundry.schedules.Linear` |

Namespaces are not folders. A part is imported on first use.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec

from foundry.core.moved_modules import current_name

PARTS = {
    "foundry.DiT": "foundry.models.dit.DiT",
    "foundry.HuggingFaceCausalLM": "foundry.models.huggingface.HuggingFaceCausalLM",
    "foundry.PolicyDiT": "foundry.models.policy_dit.PolicyDiT",
    "foundry.PrefixVLM": "foundry.models.vlm.PrefixVLM",
    "foundry.Transformer": "foundry.models.transformer.Transformer",
    "foundry.VLA": "foundry.models.vla.VLA",
    "foundry.ActionRegression": "foundry.objectives.action_chunks.ActionRegression",
    "foundry.DPO": "foundry.objectives.dpo.DPO",
    "foundry.Diffusion": "foundry.objectives.diffusion.Diffusion",
    "foundry.DiffusionPolicy": "foundry.objectives.action_chunks.DiffusionPolicy",
    "foundry.Distillation": "foundry.objectives.distillation.Distillation",
    "foundry.FlowPolicy": "foundry.objectives.action_chunks.FlowPolicy",
    "foundry.GRPO": "foundry.objectives.grpo.GRPO",
    "foundry.NextToken": "foundry.objectives.next_token.NextToken",
    "foundry.SFT": "foundry.objectives.sft.SFT",
    "foundry.Gymnasium": "foundry.simulators.gymnasium.Gymnasium",
    "foundry.MetaWorld": "foundry.simulators.metaworld.MetaWorld",
    "foundry.Tabletop": "foundry.simulators.tabletop.Tabletop",
    "foundry.MLflowTracker": "foundry.tracking.mlflow.tracker.MLflowTracker",
    "foundry.TensorBoard": "foundry.tracking.tensorboard.TensorBoard",
    "foundry.WandB": "foundry.tracking.wandb.WandB",
    "foundry.datasets.arithmetic": "foundry.data.arithmetic.arithmetic",
    "foundry.datasets.chat_files": "foundry.data.chats.chat_files",
    "foundry.datasets.demonstrations": "foundry.data.demonstrations.demonstrations",
    "foundry.datasets.digits": "foundry.data.digits.digits",
    "foundry.datasets.image_chat_files": "foundry.data.image_chats.image_chat_files",
    "foundry.datasets.image_folder": "foundry.data.image_folder.image_folder",
    "foundry.datasets.lerobot": "foundry.data.lerobot.lerobot",
    "foundry.datasets.preference_files": "foundry.data.preferences.preference_files",
    "foundry.datasets.prompt_files": "foundry.data.prompts.prompt_files",
    "foundry.datasets.scenes": "foundry.data.scenes.scenes",
    "foundry.datasets.stdlib_text": "foundry.data.text.stdlib_text",
    "foundry.datasets.text_files": "foundry.data.text.text_files",
    "foundry.datasets.token_files": "foundry.data.token_files.token_files",
    "foundry.evals.DrawnSamples": "foundry.evaluators.drawn_samples.DrawnSamples",
    "foundry.evals.ExactMatch": "foundry.evaluators.exact_match.ExactMatch",
    "foundry.evals.HeldOut": "foundry.evaluators.held_out.HeldOut",
    "foundry.evals.Success": "foundry.evaluators.success.Success",
    "foundry.optimizers.adam": "foundry.optim.optimizers.adam",
    "foundry.optimizers.adamw": "foundry.optim.optimizers.adamw",
    "foundry.optimizers.muon": "foundry.optim.optimizers.muon",
    "foundry.optimizers.sgd": "foundry.optim.optimizers.sgd",
    "foundry.rewards.Arithmetic": "foundry.environments.matching.Arithmetic",
    "foundry.rewards.ExactMatch": "foundry.environments.matching.ExactMatch",
    "foundry.rewards.Format": "foundry.environments.matching.Format",
    "foundry.rewards.MultipleChoice": "foundry.environments.matching.MultipleChoice",
    "foundry.rewards.Python": "foundry.environments.python.Python",
    "foundry.schedules.Constant": "foundry.optim.schedules.Constant",
    "foundry.schedules.Cosine": "foundry.optim.schedules.Cosine",
    "foundry.schedules.InverseSquareRoot": "foundry.optim.schedules.InverseSquareRoot",
    "foundry.schedules.Linear": "foundry.optim.schedules.Linear",
    "foundry.schedules.WSD": "foundry.optim.schedules.WSD",
}
"""Original paths of parts by public name. Entries never change: older configurations contain these paths, the hash of a
configuration uses them, and `moved_modules` maps them to current paths.
"""

NAMESPACES = tuple(dict.fromkeys(name.rpartition(".")[0] for name in PARTS if name.count(".") > 1))


def public_name(path: str) -> str:
    """Return the public name for a dotted path of a foundry part or of its attribute; return other paths unchanged."""
    if not path.startswith("foundry."):
        return path
    return _replace(path, _NAMES) or _replace(current_name(path), _NAMES) or path


def original_path(path: str) -> str:
    """Return the original path for a public name or dotted path of a part; return other paths unchanged."""
    name = public_name(path)
    return _replace(name, PARTS) or path


def current_path(path: str) -> str:
    """Return the current dotted path for a public name or an older path."""
    return current_name(original_path(path))


def find_part(name: str) -> object:
    """Import a part.

    Args:
        name: public name, such as `foundry.GRPO`.

    Raises:
        AttributeError: the name is not in `PARTS`.
    """
    owner, _, attribute = name.rpartition(".")
    if name not in PARTS:
        raise AttributeError(f"module {owner!r} has no attribute {attribute!r}")
    module, _, attribute = current_name(PARTS[name]).rpartition(".")
    return getattr(import_module(module), attribute)


def names_in(namespace: str) -> list[str]:
    """Return the names of a namespace, such as `Linear` of `foundry.schedules`."""
    return [name.rpartition(".")[2] for name in PARTS if name.rpartition(".")[0] == namespace]


def install() -> None:
    """Register the namespaces as modules, without importing parts."""
    for name in NAMESPACES:
        namespace = sys.modules.setdefault(name, _Namespace(name))
        setattr(sys.modules["foundry"], name.rpartition(".")[2], namespace)


class _Namespace(type(sys)):  # type: ignore[misc] # the type of modules
    """Module type that looks up its attributes in `PARTS`."""

    def __init__(self, name: str) -> None:
        super().__init__(name, f"Public names of foundry's parts; see {__name__}.")
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> object:
        return find_part(f"{self.__name__}.{name}")

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *names_in(str(self.__name__))})


def _replace(path: str, table: dict[str, str]) -> str | None:
    """Replace the longest prefix of a path that is in the table; return None if no prefix is."""
    beginning = path
    while beginning and beginning not in table:
        beginning = beginning.rpartition(".")[0]
    return table[beginning] + path.removeprefix(beginning) if beginning else None


def _names() -> dict[str, str]:
    """Return the public names by original and by current path."""
    return {path: name for name, original in PARTS.items() for path in (original, current_name(original))}


_NAMES = _names()
