"""Imports of moved modules by their old names.

`import foundry.old`, `from foundry.old import X`, `python -m foundry.old`, pickles and dotted paths find the module by
its old name. Both names share one module object, so patching one also patches the other.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # not imported at run time, since every import of foundry runs this module
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

MOVED = {
    "foundry.cli": "foundry.commands.main",
    "foundry.config.duration": "foundry.core.duration",
    "foundry.config.errors": "foundry.core.errors",
    **dict.fromkeys(
        (
            "foundry.core.protocols.ComparingObjective",
            "foundry.core.protocols.GenerativeObjective",
            "foundry.core.protocols.PrecomputingObjective",
            "foundry.core.protocols.PredictingObjective",
            "foundry.core.protocols.SourcingObjective",
        ),
        "foundry.core.protocols.Objective",
    ),
    "foundry.config.checks.environments": "foundry.tasks.post_training.checks.environments",
    "foundry.config.schemas.distillation": "foundry.tasks.post_training.schemas.distillation",
    "foundry.config.schemas.policy": "foundry.tasks.post_training.schemas.policy",
    "foundry.config.schemas.rollouts": "foundry.tasks.post_training.schemas.rollouts",
    "foundry.config.teacher": "foundry.tasks.post_training.teacher",
    **{
        f"foundry.config.schemas.data.{name}": f"foundry.tasks.post_training.schemas.data.{name}"
        for name in ("PreferenceFiles", "PromptFiles")
    },
    **{
        f"foundry.config.schemas.data.rows.{name}": f"foundry.tasks.post_training.schemas.data.{name}"
        for name in ("PreferenceFiles", "PromptFiles")
    },
    **{
        f"foundry.config.schemas.environment.{name}": f"foundry.tasks.post_training.schemas.environment.{name}"
        for name in (
            "Arithmetic",
            "Environment",
            "ExactMatch",
            "Format",
            "InWorker",
            "MultipleChoice",
            "Python",
            "check_weights",
        )
    },
    **{
        f"foundry.config.schemas.objective.{name}": f"foundry.tasks.post_training.schemas.objective.{name}"
        for name in ("DPO", "GRPO", "Distillation", "PreferenceLoss", "Reference")
    },
    **{
        f"foundry.core.protocols.{name}": f"foundry.tasks.post_training.protocols.{name}"
        for name in ("Prepared", "Rollout", "RolloutObjective")
    },
    "foundry.core.stopped": "foundry.core.stop_signals",
    "foundry.data.chats": "foundry.data.conversations.chats",
    "foundry.data.conversations.preferences": "foundry.tasks.post_training.data.preferences",
    "foundry.data.conversations.prompts": "foundry.tasks.post_training.data.prompts",
    "foundry.data.demonstrations": "foundry.tasks.robots.data.demonstrations",
    "foundry.data.digits": "foundry.data.images.digits",
    "foundry.data.image_chats": "foundry.data.conversations.image_chats",
    "foundry.data.image_folder": "foundry.data.images.image_folder",
    "foundry.data.lerobot": "foundry.tasks.robots.data.lerobot",
    "foundry.data.lerobot_writing": "foundry.tasks.robots.data.lerobot_writing",
    "foundry.data.preferences": "foundry.data.conversations.preferences",
    "foundry.data.prompts": "foundry.data.conversations.prompts",
    "foundry.data.scenes": "foundry.tasks.robots.data.scenes",
    "foundry.data.text": "foundry.data.corpora.text",
    "foundry.data.token_files": "foundry.data.corpora.token_files",
    "foundry.data.tokenizer": "foundry.data.corpora.tokenizer",
    "foundry.environments": "foundry.tasks.post_training.environments",
    "foundry.environments.protocol": "foundry.generation.scoring",
    "foundry.evaluators.success": "foundry.tasks.robots.evaluators.success",
    "foundry.launch.slurm_end": "foundry.launch.slurm.end",
    "foundry.launch.slurm_launcher": "foundry.launch.slurm.launcher",
    "foundry.launch.slurm_queue": "foundry.launch.slurm.queue",
    "foundry.launch.slurm_submission": "foundry.launch.slurm.submission",
    "foundry.launch.slurm_task": "foundry.launch.slurm.task",
    "foundry.launch.slurm_unwatched": "foundry.launch.slurm.unwatched",
    "foundry.library": "foundry.commands.library",
    "foundry.models.huggingface": "foundry.models.pretrained.huggingface",
    "foundry.models.policy_dit": "foundry.tasks.robots.models.policy_dit",
    "foundry.models.vla": "foundry.tasks.robots.models.vla",
    "foundry.objectives.action_chunks": "foundry.tasks.robots.action_chunks",
    "foundry.objectives.advantages": "foundry.tasks.post_training.objectives.advantages",
    "foundry.objectives.distillation": "foundry.tasks.post_training.objectives.distillation",
    "foundry.objectives.divergence": "foundry.tasks.post_training.objectives.divergence",
    "foundry.objectives.dpo": "foundry.tasks.post_training.objectives.dpo",
    "foundry.objectives.grpo": "foundry.tasks.post_training.objectives.grpo",
    "foundry.objectives.kl": "foundry.tasks.post_training.objectives.kl",
    "foundry.objectives.policy_gradient": "foundry.tasks.post_training.objectives.policy_gradient",
    "foundry.objectives.rollout": "foundry.tasks.post_training.protocols",
    "foundry.planning.generation": "foundry.tasks.post_training.rollouts.cache_size",
    "foundry.rollouts": "foundry.tasks.post_training.rollouts",
    "foundry.simulators": "foundry.tasks.robots.simulators",
    "foundry.simulators.protocol": "foundry.core.simulator",
    "foundry.train": "foundry.engine.train",
    "foundry.training.events": "foundry.core.events",
    "foundry.training.model_hooks": "foundry.core.model_hooks",
    "foundry.training.progress": "foundry.core.progress",
    "foundry.training.protocols": "foundry.core.protocols",
}
"""New names by old names of modules, packages with their modules, classes and functions.

The entry with the longest old name applies. A new name may be the old name of another entry. Entries are never removed.
A package whose modules moved to several places needs no entry. A module that lost a class or function needs
`__getattr__ = find_moved(__name__)`.
"""


def current_name(path: str) -> str:
    """Return a dotted path with old names replaced by current names."""
    while (renamed := _apply_entry(path)) is not None:
        path = renamed
    return path


def _apply_entry(path: str) -> str | None:
    """Apply the entry with the longest old name to a path; return None if no entry applies."""
    prefix = path
    while prefix not in MOVED:
        prefix = prefix.rpartition(".")[0]
        if not prefix:
            return None
    return MOVED[prefix] + path.removeprefix(prefix)


def find_moved(module: str) -> "Callable[[str], object]":
    """Return a `__getattr__` that finds classes and functions that have moved to other modules.

    Args:
        module: `__name__` of the module.
    """

    def find(name: str) -> object:
        path = f"{module}.{name}"
        if (path_now := current_name(path)) == path:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from importlib import import_module

        owner, _, attribute = path_now.rpartition(".")
        return getattr(import_module(owner), attribute)

    return find


class MovedModules:
    """Finder of modules by old names, for `sys.meta_path`."""

    @staticmethod
    def find_spec(
        fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return the import spec of an old module or package name; None for other names."""
        if not fullname.startswith("foundry.") or not MOVED:
            return None
        from importlib.machinery import ModuleSpec, PathFinder
        from importlib.util import find_spec

        name = current_name(fullname)
        if name != fullname:
            if (target_spec := find_spec(name)) is None:
                return None
            loader = _Alias(name)
            spec = ModuleSpec(fullname, loader, origin=target_spec.origin)  # type: ignore[arg-type] # a loader by its methods
            spec.submodule_search_locations = target_spec.submodule_search_locations
            return spec
        if any(old.startswith(f"{fullname}.") for old in MOVED) and PathFinder.find_spec(fullname, path) is None:
            return ModuleSpec(fullname, None, is_package=True)  # all modules of this package have moved
        return None


class _Alias:
    """Loader that imports a module by its current name."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: "ModuleSpec") -> "ModuleType":
        from importlib import import_module

        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: "ModuleType") -> None:
        module.__spec__ = self._spec  # replaces the spec of the old name, which Python has set

    def get_code(self, fullname: str) -> "CodeType | None":
        """Return the code of the module, for `python -m`."""
        from importlib.util import find_spec

        spec = find_spec(self._name)
        get_code: Callable[[str], CodeType | None] | None = getattr(spec and spec.loader, "get_code", None)
        return None if get_code is None else get_code(self._name)


def install() -> None:
    """Add the finder to `sys.meta_path` once.

    The finder is placed before the file finder, because the old folders may still exist with cached bytecode.
    """
    if MovedModules not in sys.meta_path:
        sys.meta_path.insert(0, MovedModules)
