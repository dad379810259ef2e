"""Old names of modules that have moved: importing one gives the very module of the new place.

`import foundry.old`, `from foundry.old import X`, `python -m foundry.old`, pickles and paths as text all work. There is
one module, so that it does not matter by which name it is patched. Nothing is imported before it is asked for.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:  # this is read by every import of foundry
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

MOVED: dict[str, str] = {
    "foundry.commands.policy_eval": "foundry.tasks.robots.evaluation",
    "foundry.config.checks.episodes": "foundry.tasks.robots.checks.episodes",
    "foundry.config.checks.policies": "foundry.tasks.robots.checks.policies",
    "foundry.config.checks.success": "foundry.tasks.robots.checks.success",
    "foundry.config.lerobot": "foundry.tasks.robots.lerobot_info",
    "foundry.config.schemas.action_chunks": "foundry.tasks.robots.schemas.objective",
    "foundry.config.schemas.data.episodes": "foundry.tasks.robots.schemas.data",
    "foundry.data.robots": "foundry.tasks.robots.data",
    "foundry.evaluators.episodes": "foundry.tasks.robots.evaluators.episodes",
    "foundry.evaluators.films": "foundry.tasks.robots.evaluators.films",
    "foundry.evaluators.rates": "foundry.tasks.robots.evaluators.rates",
    "foundry.evaluators.success": "foundry.tasks.robots.evaluators.success",
    "foundry.models.policy_dit": "foundry.tasks.robots.models.policy_dit",
    "foundry.models.vla": "foundry.tasks.robots.models.vla",
    "foundry.objectives.action_chunks": "foundry.tasks.robots.action_chunks",
    "foundry.simulators": "foundry.tasks.robots.simulators",
    "foundry.simulators.protocol": "foundry.core.simulator",
    "foundry.tracking.success_figure": "foundry.tasks.robots.success_figure",
}
"""The new name by the old one, each of a module, or of a package with all that is in it.

Of several entries for a module the longest old name holds. A new name may be an old name of another entry. Entries stay
for good. An old package whose modules went to several places needs no entry of its own.
"""


def current_name(path: str) -> str:
    """Return the dotted path of a module, or of a class or function in one, with the module's name of today."""
    while (moved := _moved(path)) is not None:
        path = moved
    return path


def _moved(path: str) -> str | None:
    """What the entry with the longest old name makes of a path; None if there is no entry."""
    old = path
    while old not in MOVED:
        old = old.rpartition(".")[0]
        if not old:
            return None
    return MOVED[old] + path.removeprefix(old)


class MovedModules:
    """Finder of modules by their old names, for `sys.meta_path`."""

    @staticmethod
    def find_spec(
        fullname: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        """Return how to import a module by an old name; None for any other name."""
        if not fullname.startswith("foundry.") or not MOVED:
            return None
        from importlib.machinery import ModuleSpec, PathFinder
        from importlib.util import find_spec

        name = current_name(fullname)
        if name != fullname:
            if (there := find_spec(name)) is None:
                return None
            spec = ModuleSpec(fullname, _Alias(name), origin=there.origin)
            spec.submodule_search_locations = there.submodule_search_locations
            return spec
        if any(old.startswith(f"{fullname}.") for old in MOVED) and PathFinder.find_spec(fullname, path) is None:
            return ModuleSpec(fullname, None, is_package=True)  # an old package, of which only names are left
        return None


class _Alias:
    """Loader that imports a module by its name of today."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: "ModuleSpec") -> "ModuleType":
        from importlib import import_module

        module = import_module(self._name)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: "ModuleType") -> None:
        module.__spec__ = self._spec  # Python has replaced it by that of the old name

    def get_code(self, fullname: str) -> "CodeType | None":
        """Return the module's code, which `python -m` runs."""
        from importlib.util import find_spec

        loader = getattr(find_spec(self._name), "loader", None)
        code: CodeType | None = loader.get_code(self._name) if hasattr(loader, "get_code") else None
        return code


def install() -> None:
    """Have Python find modules by their old names, before leftover folders of the old places; once."""
    if MovedModules not in sys.meta_path:
        sys.meta_path.insert(0, MovedModules)
