"""`simulator=`: foundry's tabletop scene, environments of Gymnasium, and Meta-World."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from foundry.config.packages import missing_message, pip_command
from foundry.config.schemas.simulator import Simulator
from foundry.config.setting import setting
from foundry.core.errors import Violation, as_text, nearest
from foundry.core.safe_path import local_remedy

TABLETOP_STATE_DIMS = {"around": 17, "push": 19, "touch": 17}
"""State size of each tabletop task if the state contains the positions of the blocks."""


TABLETOP_STATE_DIM_WITH_IMAGE = 4
"""State size if the policy sees the blocks in an image: position and velocity of the pusher."""


def missing_package(package: str, extra: str, key: str = "simulator") -> Iterator[Violation]:
    """Yield an error if the package of a simulator is not installed."""
    if find_spec(package) is None:
        yield Violation(key, missing_message(package, extra))


def _parse_task(text: str) -> str:
    """Check the name of a tabletop task and return it.

    Raises:
        ValueError: if the task does not exist.
    """
    if text not in TABLETOP_STATE_DIMS:
        among = ", ".join(TABLETOP_STATE_DIMS)
        raise ValueError(f"is {as_text(text)} but must be one of {among}{nearest(text, TABLETOP_STATE_DIMS)}")
    return text


@dataclass(frozen=True, kw_only=True)
class Tabletop(Simulator):
    """A pusher and three blocks on a table, simulated in MuJoCo."""

    _target_: str = "foundry.Tabletop"
    task: str = setting(
        "around",
        "around: touch the red block, past the green one on either side; push: push the named block to the named "
        "side; touch: touch the named block and no other",
        parse=_parse_task,
    )
    state_dim: int = setting(
        "${tabletop_state_dim:}",
        "size of the state that a policy observes: pusher, blocks and goal; with an image, only the pusher",
        ge=1,
        le=10**6,
        runtime=True,
        alone=None,
    )
    action_dim: int = setting(2, "size of an action: the pusher's velocity", ge=1, le=10**6, runtime=True)

    def check(self) -> Iterator[Violation]:
        """Check that MuJoCo is installed and the sizes match the task."""
        yield from missing_package("mujoco", "robot")
        if self.task not in TABLETOP_STATE_DIMS:
            return
        has_image = self.image_size is not None
        sizes = {"state_dim": tabletop_state_dim(self.task, has_image=has_image), "action_dim": 2}
        for name, size in sizes.items():
            if getattr(self, name) != size:
                where = f"task {self.task}{' with a picture' if has_image else ''}"
                message = f"is {getattr(self, name)} but {where} has {size}; leave it out"
                yield Violation(f"simulator.{name}", message)


def tabletop_state_dim(task: str, *, has_image: bool) -> int:
    """Return the state size of a tabletop task."""
    return TABLETOP_STATE_DIM_WITH_IMAGE if has_image else TABLETOP_STATE_DIMS[task]


FETCH = "gymnasium_robotics"
"""Module that registers the environments of gymnasium-robotics."""


OWN_EXPERTS = tuple(f"foundry.simulators.experts.fetch_{task}" for task in ("push", "pick_and_place"))


_FIRST_MUJOCO_WITHOUT_FETCH, _LAST_FETCH_WITH_THE_FAULT = (3, 12), (1, 4, 2)


@dataclass(frozen=True, kw_only=True)
class Gymnasium(Simulator):
    """Any environment of Gymnasium with numeric observations and actions."""

    _target_: str = "foundry.Gymnasium"
    id: str = setting("???", "ID of the environment in gymnasium.make, such as FetchPush-v4")
    kwargs: dict[str, Any] = setting(dict, "further arguments of gymnasium.make, as a mapping")
    import_module: str | None = setting(None, "module to import first, which registers the environment; null: none")
    success_reward: float | None = setting(
        None, "smallest reward of a step that means success; null: read success from `is_success` or `success` in info"
    )
    expert: str | None = setting(None, "dotted path of a function that returns an action for a state; null: no expert")
    instruction: str | None = setting(None, "instruction that describes the task; null: none")

    def check(self) -> Iterator[Violation]:
        """Check that the required packages are installed in compatible versions."""
        yield from missing_package("gymnasium", "robot")
        yield from check_fetch(self.import_module)
        module = (self.import_module or "").partition(".")[0]
        if module not in ("", FETCH) and find_spec(module) is None:
            remedy = local_remedy(module) or "; install its package or add it to PYTHONPATH"
            message = f"is {self.import_module}, which does not exist{remedy}"
            yield Violation("simulator.import_module", message)

    @staticmethod
    def foreign_settings(node: Mapping[str, Any]) -> Iterator[str]:
        """Yield the names of recorded settings that can run code from outside foundry and Gymnasium's environments.

        Gymnasium imports the module before the colon of an id. An environment can use its keyword arguments in any way,
        for example as the id of another environment.
        """
        builtin_values: Mapping[str, tuple[Any, ...]] = {"import_module": (None, FETCH), "expert": (None, *OWN_EXPERTS)}
        yield from (name for name, allowed in builtin_values.items() if node.get(name) not in allowed)
        if ":" in str(node.get("id")):
            yield "id"
        if node.get("kwargs"):
            yield "kwargs"


@dataclass(frozen=True, kw_only=True)
class MetaWorld(Simulator):
    """One of the fifty manipulation tasks of Meta-World."""

    _target_: str = "foundry.MetaWorld"
    task: str = setting("pick-place-v3", "name of the task, such as reach-v3, push-v3 or drawer-open-v3")
    state_dim: int = setting(39, "size of the state that a policy observes", ge=1, le=10**6, runtime=True)
    action_dim: int = setting(4, "size of an action", ge=1, le=10**6, runtime=True)
    max_steps: int = setting(200, "maximum number of actions in an episode", ge=1, le=10**9)

    def check(self) -> Iterator[Violation]:
        """Check that the required packages are installed."""
        for package in ("metaworld", "packaging"):
            yield from missing_package(package, "metaworld")


def check_fetch(import_module: str | None) -> Iterator[Violation]:
    """Yield an error if `import_module` is gymnasium-robotics and it is missing or does not work with this MuJoCo."""
    if import_module != FETCH:
        return
    if missing := list(missing_package(FETCH, "fetch")):
        yield from missing
        return
    mujoco, fetch = _version("mujoco"), _version("gymnasium-robotics")
    if mujoco[:2] >= _FIRST_MUJOCO_WITHOUT_FETCH and fetch <= _LAST_FETCH_WITH_THE_FAULT:
        names = [".".join(map(str, parts)) for parts in (fetch, mujoco)]
        message = f"needs mujoco<3.12 for gymnasium-robotics {names[0]}, but {names[1]} is installed"
        yield Violation("simulator", f"{message}; {pip_command('mujoco<3.12', 'fetch')}")


def _version(package: str) -> tuple[int, ...]:
    """Return the version of a package as numbers; empty if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return tuple(int(part) for part in version(package).split(".") if part.isdecimal())
    except PackageNotFoundError:
        return ()
