"""One job of `hydra/launcher=ray`: a placement group with an actor for each rank, started again if a node dies."""

import os
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foundry import __version__
from foundry.config.schemas.launcher import Ray
from foundry.core.errors import format_reason
from foundry.launch.job_state import JobState, Phase
from foundry.launch.local import describe_exit
from foundry.launch.ray.actor import Place, RankActor
from foundry.launch.ray.cluster import bundle
from foundry.run_dir.attempt import ATTEMPT
from foundry.run_dir.files import write_atomically
from foundry.run_dir.names import OUTPUT, RAY
from foundry.run_dir.redact import one_line
from foundry.run_dir.status import read_status, write_status

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

_PATIENCE_SECONDS = 5.0  # from the first failure until SIGTERM to the other ranks, whose errors may name the cause
_LAST_PATIENCE_SECONDS = 30.0  # from the first failure until SIGKILL
_CALLS = 8  # concurrent calls of an actor: `wait` does not return before the rank ends

_IDENTITY = ("class_name: ", "actor_id: ", "pid: ", "namespace: ", "ip: ")


class RayJob:
    """A job in a Ray cluster.

    If the head node does not respond, a method raises Ray's error; the same call continues later.

    Args:
        module: module that executes the run of a run directory.
        run_dir: the run directory.
        settings: settings of the launcher.
    """

    def __init__(self, module: str, run_dir: Path, settings: Ray) -> None:
        self._module, self._run_dir, self._settings = module, run_dir, settings
        self._num_restarts = 0
        self._is_stopping = False
        self._end: JobState | None = None
        self._note = ""
        """Reason of the last restart."""
        self._begin_attempt()

    def _begin_attempt(self) -> None:
        """Set the state of a job that has not been submitted since its last attempt."""
        self._token = uuid.uuid4().hex
        """Name of the placement group, and content of the file that nodes look for."""
        write_atomically(self._run_dir / RAY, self._token)
        self._places = list[Place]()
        self._calls = list[Callable[[], Any]]()
        """For each rank, a function that starts it unless it has been started, and returns a reference to its end."""
        self._refs = dict[Any, int]()
        """Rank by the reference to its end, for ranks that have not ended."""
        self._ends = dict[int, int | str]()
        """Exit code of each rank that has ended, or the reason why its actor is lost, in order of their ends."""
        self._failure_time = 0.0
        self._problem = ""
        """Error of an actor that could not start its rank."""
        self._group: PlacementGroup | None = None
        """Placement group of the actors; None if the job is not in Ray's queue."""
        self._actors, self._place_refs = list[Any](), list[Any]()

    @property
    def has_ended(self) -> bool:
        """Whether the job has ended and is not submitted again."""
        return self._end is not None

    def submit(self) -> None:
        """Put the job into Ray's queue, unless it is there: a placement group, and actors that start when it is placed.

        Ray may have created the group although an earlier call raised an error; then this group is used.
        """
        if self._group is not None:
            return
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        settings, group = self._settings, self._create_group()
        actor = ray.remote(RankActor)
        options = {
            "num_cpus": settings.cpus_per_task,
            "num_gpus": settings.gpus_per_task or 0,
            "memory": int(bundle(settings).get("memory", 0)) // settings.tasks_per_node or None,
            "resources": dict(settings.resources) or None,
            "max_concurrency": _CALLS,
            "runtime_env": dict(settings.runtime_env) or None,
        }
        strategies = [PlacementGroupSchedulingStrategy(group, node) for node in range(settings.nodes)]
        self._actors = [
            actor.options(**options, scheduling_strategy=strategy).remote()
            for strategy in strategies
            for _ in range(settings.tasks_per_node)
        ]
        arguments = str(self._run_dir), self._token, str(Path.cwd()), __version__
        self._place_refs = [actor.locate.remote(*arguments) for actor in self._actors]
        self._group = group

    def poll(self) -> JobState:
        """Return the state of the job; start its ranks when Ray has placed all actors, and restart lost ranks."""
        if self._end is not None:
            return self._end
        if self._group is None:
            self.submit()
            return JobState(phase=Phase.WAITING, detail=self._note)
        return self._poll_ranks() if self._places else self._poll_actors()

    def stop(self, *, kill: bool = False) -> None:
        """Let the ranks save and stop, or kill them; a job that waits for a place leaves Ray's queue."""
        self._is_stopping = True
        if self._end is not None:
            return
        if not self._places:
            self._finish(JobState(phase=Phase.ENDED, detail="it was stopped before it started", outcome="stopped"))
            return
        for rank in self._refs.values():
            self._actors[rank].stop.remote(kill=kill)

    def output(self) -> Path:
        """Return the file with the output of the first rank that failed, or else of rank 0."""
        return self._run_dir / _output_name(next((rank for rank, end in self._ends.items() if end), 0))

    def _create_group(self) -> "PlacementGroup":
        """Return a new placement group, or the group that an earlier call has created without an answer of Ray."""
        from ray.exceptions import RaySystemError
        from ray.util.placement_group import get_placement_group, placement_group

        bundles = [bundle(self._settings)] * self._settings.nodes
        try:
            return placement_group(bundles, strategy=self._settings.strategy.value, name=self._token)
        except RaySystemError as error:
            if "already exists" not in str(error):
                raise
            return get_placement_group(self._token)  # not before: in an outage this call would wait without a limit

    def _poll_actors(self) -> JobState:
        """Start the ranks if Ray has started all actors."""
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError
        from ray.util.placement_group import placement_group_table

        ready, pending = ray.wait(self._place_refs, num_returns=len(self._place_refs), timeout=0)
        try:
            places = ray.get(ready)
        except ActorDiedError as error:
            if _is_node_death(error):
                return self._restart(_describe_death(error))
            return self._finish(_failed(f"Ray cannot start an actor: {_describe_death(error)}"))
        except ActorUnavailableError:
            return self._restart("a node did not respond before the start")
        except RayError as error:
            return self._finish(_failed(f"Ray cannot start an actor: {one_line(str(error))}"))
        if problems := [place.problem for place in places if place.problem]:
            return self._finish(_failed(problems[0]))
        if pending:
            group = placement_group_table(self._group)
            if group.get("state") == "CREATED":
                reason = "Ray starts its actors"
            elif group.get("stats", {}).get("scheduling_state") == "INFEASIBLE":
                reason = "no node of the cluster has these resources"
            else:
                reason = "Resources"  # as Slurm says
            return JobState(phase=Phase.WAITING, detail=reason)
        self._places = places
        self._start_ranks()
        return self._running()

    def _start_ranks(self) -> None:
        """Start a process for each rank; a job with one rank needs no process group."""
        settings, num_ranks = self._settings, len(self._actors)
        paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        variables = {
            "OMP_NUM_THREADS": str(settings.cpus_per_task),
            "PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in paths if path),
            **settings.env_vars,
            ATTEMPT: self._token,
        }
        for rank, actor in enumerate(self._actors):
            own = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % settings.tasks_per_node),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(settings.tasks_per_node),
                "MASTER_ADDR": self._places[0].host,
                "MASTER_PORT": str(self._places[0].port),
            }
            own_variables = variables | own if num_ranks > 1 else variables
            folder = str(Path.cwd())
            arguments = self._module, str(self._run_dir), _output_name(rank), folder, own_variables
            self._calls.append(partial(actor.run.remote, *arguments))
            self._refs[self._calls[rank]()] = rank

    def _running(self) -> JobState:
        hosts = list(dict.fromkeys(place.host for place in self._places))
        return JobState(phase=Phase.RUNNING, detail=", ".join(hosts))

    def _poll_ranks(self) -> JobState:
        """Note the ranks that have ended; end the other ranks after a failure; return the state of the job."""
        self._note_ends()
        if self._refs:
            self._end_others()
            return self._running()
        lost = {rank: end for rank, end in self._ends.items() if isinstance(end, str)}
        if lost and read_status(self._run_dir).get("state") != "finished":
            rank, reason = next(iter(lost.items()))
            return self._restart(f"rank {rank} is lost: {reason}")
        codes = {rank: end for rank, end in self._ends.items() if isinstance(end, int)}
        rank, code = next(((rank, code) for rank, code in codes.items() if code), (0, 0))
        how = self._problem or describe_exit(128 - code if code > 128 else code)
        return self._finish(_failed(f"rank {rank} {how}" if len(self._actors) > 1 else how))

    def _note_ends(self) -> None:
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError, RayError

        ended, _ = ray.wait(list(self._refs), num_returns=len(self._refs), timeout=0)
        for ref in ended:
            rank = self._refs.pop(ref)
            try:
                self._ends[rank] = ray.get(ref)
            except ActorUnavailableError:  # Ray does not know yet whether the actor is dead
                self._refs[self._calls[rank]()] = rank
                continue
            except ActorDiedError as error:
                self._ends[rank] = _describe_death(error)
            except RayError as error:  # raised by the actor itself, such as an OSError
                self._ends[rank] = 1
                self._problem = format_reason(getattr(error, "cause", None) or error)
            if self._ends[rank]:
                self._failure_time = self._failure_time or time.monotonic()

    def _end_others(self) -> None:
        """Stop the other ranks some seconds after a failure, and kill them later: they may wait for the failed rank."""
        if not self._failure_time:
            return
        elapsed_seconds = time.monotonic() - self._failure_time
        for rank in self._refs.values():
            if elapsed_seconds > _PATIENCE_SECONDS:
                self._actors[rank].stop.remote(kill=elapsed_seconds > _LAST_PATIENCE_SECONDS)

    def _restart(self, reason: str) -> JobState:
        """Submit the job again after a node has died, unless it is being stopped or was restarted too often."""
        limit = self._settings.max_restarts
        if self._is_stopping:
            return self._finish(JobState(phase=Phase.ENDED, detail=reason, outcome="stopped"))
        if self._num_restarts >= limit:
            reason = f"{reason}; hydra.launcher.max_restarts={limit} is reached; the same command resumes it"
            write_status(self._run_dir, state="lost", reason=reason)  # a surviving rank may have recorded a consequence
            return self._finish(JobState(phase=Phase.ENDED, detail=reason, outcome="lost"))
        self._release()
        self._num_restarts += 1
        self._note = f"restart {self._num_restarts} of {limit} after: {reason}"
        restarts = [*read_status(self._run_dir).get("restarts", []), reason]
        write_status(self._run_dir, state="requeued", reason=self._note, restarts=restarts)
        self._begin_attempt()
        return self.poll()

    def _finish(self, end: JobState) -> JobState:
        self._release()
        self._end = end
        return end

    def _release(self) -> None:
        """Give the resources of the job back to Ray; its ranks have ended or are lost."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for actor in self._actors:
            ray.kill(actor)
        if self._group is not None:
            remove_placement_group(self._group)


def _output_name(rank: int) -> str:
    return OUTPUT if rank == 0 else f"output.rank{rank}.log"


def _failed(detail: str) -> JobState:
    return JobState(phase=Phase.ENDED, detail=detail)


def _is_node_death(error: Exception) -> bool:
    return "node has died" in str(error)


def _describe_death(error: Exception) -> str:
    """Return one line about the death of an actor: its node, or Ray's explanation without the actor's identity."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    fields = dict(line.split(": ", 1) for line in lines if line.startswith(_IDENTITY))
    if _is_node_death(error):
        return f"node {fields.get('ip', '')} has died"
    details = [line for line in lines[1:] if not line.startswith(_IDENTITY)]
    return one_line(" ".join(details or lines) or type(error).__name__)
