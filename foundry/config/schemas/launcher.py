"""Settings of the launchers (`hydra/launcher`), which start the jobs of a sweep."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

from omegaconf import DictConfig, OmegaConf

from foundry.config.schemas.kubernetes import Kubernetes
from foundry.config.schemas.launcher_base import PLUGINS, Launcher
from foundry.config.setting import check_fields, setting
from foundry.core.errors import Violation, as_text, counted

GROUP = "hydra/launcher"
SUBMITIT_PLUGIN = "hydra_plugins.hydra_submitit_launcher.submitit_launcher"
"""Module of hydra-submitit-launcher that defines its launchers."""


@dataclass(frozen=True, kw_only=True)
class Local(Launcher):
    """Parallel processes on this machine, with separate cores and GPUs for each job."""

    option: ClassVar[str] = "local"
    _target_: str = f"{PLUGINS}.LocalLauncher"
    n_jobs: int | None = setting(
        None,
        "maximum number of parallel jobs; null: as many as the GPUs, or without GPUs the cores, allow",
        ge=1,
        le=1024,
    )
    cores_per_job: int = setting(4, "cores per job if n_jobs=null and the machine has no GPU", ge=1, le=1024)


@dataclass(frozen=True, kw_only=True)
class Slurm(Launcher):
    """Jobs of a Slurm cluster, submitted as an array through submitit; settings are named as in submitit_slurm."""

    option: ClassVar[str] = "slurm"
    limit_remedy: ClassVar[str] = "leave it out, and set hydra.launcher.array_parallelism={}"
    _target_: str = f"{PLUGINS}.SlurmLauncher"
    submitit_folder: str = setting(
        "${hydra.sweep.dir}/.submitit/%j", "folder for the output of jobs and the files of submitit"
    )
    name: str = setting("${hydra.job.name}", "job name in the queue")
    comment: str | None = setting(None, "comment in the queue")
    partition: str | None = setting(None, "partition; null: the cluster's default")
    qos: str | None = setting(None, "quality of service")
    account: str | None = setting(None, "account to charge")
    constraint: str | None = setting(None, "required features of the nodes")
    exclude: str | None = setting(None, "nodes to exclude")
    nodes: int = setting(1, "nodes per job", ge=1, le=10**6)
    tasks_per_node: int = setting(1, "processes per node; times nodes: the number of ranks", ge=1, le=1024)
    gpus_per_node: int | None = setting(None, "GPUs per node, one for each task", ge=0, le=1024)
    gpus_per_task: int | None = setting(None, "GPUs per task, instead of gpus_per_node", ge=0, le=1)
    gres: str | None = setting(None, "generic resources, for clusters that do not support gpus_per_node")
    cpus_per_task: int | None = setting(
        None, "cores per process, including the workers of the data loader", ge=1, le=10**5
    )
    cpus_per_gpu: int | None = setting(None, "cores per GPU, instead of cpus_per_task", ge=1, le=10**5)
    mem_gb: float | None = setting(None, "memory per node in GB", gt=0, le=10**6)
    mem_per_gpu: str | None = setting(None, "memory per GPU, such as 64G, instead of mem_gb")
    mem_per_cpu: str | None = setting(None, "memory per core, such as 4G, instead of mem_gb")
    timeout_min: int = setting(60, "time limit in minutes, after which the job is queued again", ge=1, le=5_256_000)
    signal_delay_s: int = setting(
        120, "seconds before the time limit when Slurm signals the run to save a checkpoint", ge=1, le=65_535
    )
    max_num_timeout: int = setting(
        100, "maximum number of times that a job is queued again after its time limit", ge=0, le=10**6
    )
    array_parallelism: int = setting(
        256, "maximum number of jobs of the sweep that run at the same time", ge=1, le=10**6
    )
    setup: list[str] | None = setting(None, "shell commands to run before each job, such as module load")
    additional_parameters: dict[str, Any] = setting(
        dict, "further options of sbatch, as in +hydra.launcher.additional_parameters.reservation=NAME"
    )
    stderr_to_stdout: bool = setting(False, "write standard error to the file of standard output")
    detach: bool = setting(False, "submit the jobs and exit; they continue without this process")
    snapshot_code: bool = setting(
        False,
        "run a copy of foundry and of the git-tracked Python files below the current folder, stored in the sweep's "
        "directory",
    )

    def check(self, nproc_per_node: int) -> Iterator[Violation]:
        """Check for settings that contradict each other or `distributed.nproc_per_node`."""
        if self.timeout_min * 60 <= self.signal_delay_s:
            yield Violation(
                "hydra.launcher.signal_delay_s",
                f"is {self.signal_delay_s} but the time limit of {self.timeout_min} min is not longer than that, so "
                "jobs would be stopped when they start; increase hydra.launcher.timeout_min, or lower it",
            )
        if nproc_per_node != 1:
            yield Violation(
                "distributed.nproc_per_node",
                f"is {nproc_per_node} but Slurm starts the processes; set hydra.launcher.tasks_per_node instead",
            )
        yield from self._check_gpus()
        yield from self._check_alternatives()
        yield from self._check_texts()
        if "%a" in self.submitit_folder:
            message = "which has %a, but one job alone is not an array; use %j"
            yield Violation("hydra.launcher.submitit_folder", f"is {self.submitit_folder}, {message}")

    def _check_gpus(self) -> Iterator[Violation]:
        if self.gpus_per_node and self.gpus_per_node != self.tasks_per_node:
            yield Violation(
                "hydra.launcher.gpus_per_node",
                f"is {self.gpus_per_node} but tasks_per_node is {self.tasks_per_node}, and each task trains on one "
                "GPU; set both to the same value",
            )
        if self.cpus_per_gpu is not None and not self.gpus_per_task:
            yield Violation(
                "hydra.launcher.cpus_per_gpu", "is set but requires gpus_per_task=1; set that, or use cpus_per_task"
            )

    def _check_alternatives(self) -> Iterator[Violation]:
        """Check for mutually exclusive options of sbatch."""
        for names in (
            ("gpus_per_node", "gpus_per_task", "gres"),
            ("cpus_per_task", "cpus_per_gpu"),
            ("mem_gb", "mem_per_gpu", "mem_per_cpu"),
        ):
            names_set = [name for name in names if getattr(self, name) is not None]
            if len(names_set) > 1:
                yield Violation(
                    f"hydra.launcher.{names_set[1]}", f"is set together with {names_set[0]}; choose one of them"
                )

    def _check_texts(self) -> Iterator[Violation]:
        """Reject texts with line breaks, which would inject options or commands into the batch script."""
        more = self.additional_parameters
        texts = [("setup", line) for line in self.setup or ()]
        texts += [(f"additional_parameters.{name}", value) for name, value in more.items() if isinstance(value, str)]
        for name, text in texts:
            if not text.replace("\t", " ").isprintable():
                message = f"is {text!r}, which contains a line break or another control character; remove it"
                yield Violation(f"hydra.launcher.{name}", message)
        for name in more:
            if not re.fullmatch(r"[A-Za-z][\w-]*", str(name)):
                message = f"has {str(name)!r}, which is not the name of an sbatch option"
                yield Violation("hydra.launcher.additional_parameters", message)


@dataclass(frozen=True, kw_only=True)
class SubmititSlurm(Slurm):
    """Settings of `submitit_slurm`; names and defaults come from the plugin hydra-submitit-launcher."""

    option: ClassVar[str] = "submitit_slurm"
    _target_: str = f"{SUBMITIT_PLUGIN}.SlurmLauncher"
    python: str | None = setting(None, "not supported: jobs run with the Python of the sweep")
    srun_args: list[str] | None = setting(None, "not supported: foundry sets the arguments of srun")
    use_srun: bool = setting(True, "not supported: srun starts the tasks")

    def check(self, nproc_per_node: int) -> Iterator[Violation]:
        """Check also for settings of version 1.4 of the plugin that foundry's launcher does not support."""
        yield from super().check(nproc_per_node)
        for name, default in (("python", None), ("srun_args", None), ("use_srun", True)):
            if (value := getattr(self, name)) != default:
                yield Violation(
                    f"hydra.launcher.{name}",
                    f"is {as_text(value)}, which foundry's launcher does not support; leave it out",
                )


@dataclass(frozen=True, kw_only=True)
class SubmititLocal(Launcher):
    """Settings of `submitit_local`; names and defaults come from the plugin hydra-submitit-launcher."""

    option: ClassVar[str] = "submitit_local"
    _target_: str = f"{SUBMITIT_PLUGIN}.LocalLauncher"
    submitit_folder: str = setting(
        "${hydra.sweep.dir}/.submitit/%j", "folder for the output of jobs and the files of submitit"
    )
    name: str = setting("${hydra.job.name}", "name of the jobs; not shown anywhere by this launcher")
    nodes: int = setting(1, "number of machines; must be 1", ge=1, le=10**6)
    tasks_per_node: int = setting(1, "processes per job, which train together", ge=1, le=1024)
    gpus_per_node: int | None = setting(None, "GPUs per job, one for each process", ge=0, le=1024)
    cpus_per_task: int | None = setting(None, "threads per process", ge=1, le=10**5)
    mem_gb: int | None = setting(None, "memory in GB; submitit does not enforce it on one machine")
    timeout_min: int = setting(60, "time limit in minutes, after which the job is started again", ge=1, le=5_256_000)
    stderr_to_stdout: bool = setting(False, "write standard error to the file of standard output")

    def check(self, nproc_per_node: int) -> Iterator[Violation]:
        """Check for settings that submitit ignores on one machine, or that contradict the number of processes."""
        if self.nodes != 1:
            message = "but submitit_local uses only this machine; choose hydra/launcher=slurm, or leave it out"
            yield Violation("hydra.launcher.nodes", f"is {self.nodes} {message}")
        if self.mem_gb is not None:
            message = "but submitit_local does not limit memory; leave it out, or choose hydra/launcher=slurm"
            yield Violation("hydra.launcher.mem_gb", f"is {self.mem_gb} {message}")
        if nproc_per_node != 1 and self.tasks_per_node != 1:
            message = f"but hydra.launcher.tasks_per_node={self.tasks_per_node} starts the processes; leave one out"
            yield Violation("distributed.nproc_per_node", f"is {nproc_per_node} {message}")
        elif self.gpus_per_node and self.gpus_per_node != self.tasks_per_node * nproc_per_node:
            processes = self.tasks_per_node * nproc_per_node
            message = f"but a job has {counted(processes, 'rank')} with one GPU each; set it to {processes}"
            yield Violation("hydra.launcher.gpus_per_node", f"is {self.gpus_per_node} {message}")


class PlacementStrategy(Enum):
    """Distribution of a job's nodes over the machines of a Ray cluster."""

    STRICT_SPREAD = "STRICT_SPREAD"
    SPREAD = "SPREAD"
    PACK = "PACK"
    STRICT_PACK = "STRICT_PACK"


@dataclass(frozen=True, kw_only=True)
class Ray(Launcher):
    """Jobs of a Ray cluster; settings are named as in `slurm`."""

    option: ClassVar[str] = "ray"
    _target_: str = f"{PLUGINS}.RayLauncher"
    address: str | None = setting(
        None,
        "address of the cluster, such as 10.0.0.1:6379; null: the environment variable RAY_ADDRESS, or else the "
        "cluster of this machine; local: start Ray on this machine, for this sweep only",
    )
    nodes: int = setting(1, "nodes per job", ge=1, le=10**6)
    tasks_per_node: int = setting(1, "processes per node; times nodes: the number of ranks", ge=1, le=1024)
    cpus_per_task: int = setting(1, "cores per process, including the workers of the data loader", ge=1, le=10**5)
    gpus_per_task: float | None = setting(
        None, "GPUs per process; with a fraction, several jobs share a GPU; null: none", ge=0, le=1
    )
    mem_gb: float | None = setting(
        None, "memory per node in GB to reserve; Ray does not enforce it; null: none", gt=0, le=10**6
    )
    resources: dict[str, float] = setting(dict, "custom resources per process, as in +hydra.launcher.resources.a100=1")
    strategy: PlacementStrategy = setting(
        PlacementStrategy.STRICT_SPREAD,
        "whether the nodes of a job must be different machines (STRICT_SPREAD), the same one (STRICT_PACK), or "
        "preferably so (SPREAD, PACK)",
    )
    array_parallelism: int = setting(
        256, "maximum number of jobs of the sweep that are in Ray's queue or run at the same time", ge=1, le=10**6
    )
    max_restarts: int = setting(
        3, "maximum number of times that a job is started again after one of its nodes has died", ge=0, le=10**6
    )
    env_vars: dict[str, str] = setting(
        dict, "environment variables of the jobs, as in '+hydra.launcher.env_vars.HF_TOKEN=${oc.env:HF_TOKEN}'"
    )
    runtime_env: dict[str, Any] = setting(
        dict, "Ray's runtime environment, which Ray prepares on each node, as in +hydra.launcher.runtime_env.pip=[foo]"
    )
    autoscaling: bool = setting(
        False, "the cluster adds nodes on demand: accept jobs that none of the present nodes can run"
    )

    def check(self, nproc_per_node: int) -> Iterator[Violation]:
        """Check for settings that contradict each other or `distributed.nproc_per_node`."""
        if nproc_per_node != 1:
            message = "but Ray starts the processes; set hydra.launcher.tasks_per_node instead"
            yield Violation("distributed.nproc_per_node", f"is {nproc_per_node} {message}")
        if self.address is not None and "://" in self.address:
            message = "but foundry connects as a node of the cluster does; set HOST:PORT, and start the command there"
            yield Violation("hydra.launcher.address", f"is {self.address} {message}")
        if self.gpus_per_task and self.gpus_per_task < 1 and self.nodes * self.tasks_per_node > 1:
            message = f"but each of the {self.nodes * self.tasks_per_node} processes of a job needs its own GPU"
            yield Violation("hydra.launcher.gpus_per_task", f"is {self.gpus_per_task:g} {message}; set it to 1")
        for name, amount in self.resources.items():
            if name in ("CPU", "GPU", "memory") or not 0 < amount < math.inf:
                message = f"is {amount:g}; set a positive amount of a custom resource, or cpus_per_task, gpus_per_task"
                yield Violation(f"hydra.launcher.resources.{name}", f"{message} or mem_gb")
        if "env_vars" in self.runtime_env:
            message = "would be written to Ray's logs; set hydra.launcher.env_vars instead"
            yield Violation("hydra.launcher.runtime_env.env_vars", message)


SCHEMAS: tuple[type[Launcher], ...] = (Local, Slurm, Ray, Kubernetes)
_OF_PLUGIN: dict[str, type[Launcher]] = {SubmititSlurm._target_: SubmititSlurm, SubmititLocal._target_: SubmititLocal}


def is_known(node: DictConfig) -> bool:
    """Return True if foundry checks the launcher with these settings."""
    return OmegaConf.get_type(node) in SCHEMAS or _of_plugin(node) is not None or is_own(node)


def is_own(node: DictConfig) -> bool:
    """Return True if the launcher is a user's own class, outside of Hydra's packages of plugins."""
    target = node._get_node("_target_")
    return target is not None and not str(target._value()).startswith(("hydra_plugins.", "hydra."))


def resolve_launcher(composed: DictConfig) -> Launcher | None:
    """Return the launcher of a composed configuration, or None if foundry has no schema for it."""
    node = OmegaConf.select(composed, "hydra.launcher")
    if not isinstance(node, DictConfig):
        return None
    if OmegaConf.get_type(node) in SCHEMAS:
        launcher = OmegaConf.to_object(node)
        assert isinstance(launcher, Launcher)
        return launcher
    if (schema := _of_plugin(node)) is None:
        return None
    values: Any = OmegaConf.to_container(node, resolve=True)
    return schema(**values)


def _of_plugin(node: DictConfig) -> type[Launcher] | None:
    return _OF_PLUGIN.get(str(node.get("_target_")))


def resolve_num_tasks(composed: DictConfig) -> int:
    """Return the number of processes that the launcher starts per job, over all nodes; 1 for other launchers."""
    node = OmegaConf.select(composed, "hydra.launcher", throw_on_resolution_failure=False)
    if not isinstance(node, DictConfig):
        return 1
    # In the content, since OmegaConf takes long to look up a key that is not in a schema.
    names = [name for name in ("tasks_per_node", "nodes") if name in (node._content or ())]
    return math.prod(int(node.get(name) or 1) for name in names)


def check_launcher(composed: DictConfig) -> Iterator[Violation]:
    """Check the launcher's settings, without a query of the cluster."""
    launcher = resolve_launcher(composed)
    node = OmegaConf.select(composed, "hydra.launcher")
    if launcher is None and not (isinstance(node, DictConfig) and is_own(node)):
        return
    mode = OmegaConf.select(composed, "hydra.mode")
    if mode is not None and mode.name == "RUN":
        option = composed.hydra.runtime.choices[GROUP] if launcher is None else launcher.option
        yield Violation(GROUP, f"is {option}, which starts the jobs of a sweep; add -m, even for a single job")
        return
    if launcher is not None:
        yield from list(check_fields(launcher, "hydra.launcher")) or launcher.check(composed.distributed.nproc_per_node)
    size = OmegaConf.select(composed, "hydra.sweeper.max_batch_size")
    if size is not None and OmegaConf.select(composed, "hydra.launcher.detach"):
        remedy = (launcher or Launcher).limit_remedy.format(size)
        message = "but hydra.launcher.detach=true submits all jobs and waits for none"
        yield Violation("hydra.sweeper.max_batch_size", f"is {size} {message}; {remedy}")
