"""Source of windows whose samples are the model's own completions of prompts."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from foundry.core.errors import ConfigError, Violation
from foundry.core.protocols import Microbatch, RunContext, SourceContext, Window
from foundry.core.state_values import read_count
from foundry.data.loader import Loader
from foundry.data.packing import Pack, deal, find_bounds, first_fit_decreasing
from foundry.data.splits import DataSplits
from foundry.generation.decoding import Decoding
from foundry.generation.scoring import Judge, Judgement
from foundry.generation.text_samples import context_of
from foundry.models.token_log_probs import IGNORED_TARGET
from foundry.parallel.gathering import gather
from foundry.parallel.whole_weights import gathered
from foundry.tasks.post_training.data.prompts import RowNumbers
from foundry.tasks.post_training.protocols import Rollout, RolloutObjective
from foundry.tasks.post_training.rollouts.completions import Completion, Completions, complete, place
from foundry.tasks.post_training.rollouts.shared_prompts import resolve_sharing, share_prompts

_STREAM = "rollout"
_MAX_UNREWARDED = 3
"""Number of consecutive rollouts without any reward after which the run ends."""
log = logging.getLogger(__name__)


class RolloutSource:
    """Generates completions of prompts, and divides each rollout into the windows of several updates.

    The completions of a rollout are divided evenly among the ranks. If fewer ranks can generate all of them at a time,
    the other ranks generate none. Random numbers do not depend on the number of ranks. All ranks receive all
    completions. Within a window, completions are distributed over ranks and microbatches as in `Loader`, packed or not.
    If the model supports it, the completions of a prompt in a microbatch share the tokens of the prompt. Checkpoints
    between two updates of a rollout contain its tensors.

    Prompts are read in the global order; every rank reads all prompts of a rollout.

    Args:
        objective: defines the size of a rollout and the values to record.
        model: the wrapped model.
        run: context whose data has `train_prompts`, and whose judge, if any, scores completions.
        frozen: frozen models that the objective records values from.
        pack_tokens: tokens of a packed row; None gives each completion its own row.

    Raises:
        ConfigError: the objective needs rewards but there is no environment; or the data has no prompts; or a prompt
            leaves no room for a completion or lacks a column that the environment reads.
    """

    def __init__(
        self,
        objective: RolloutObjective,
        model: nn.Module,
        run: RunContext,
        *,
        frozen: Sequence[nn.Module] = (),
        pack_tokens: int | None = None,
    ) -> None:
        settings, data = objective.rollouts, run.data
        assert settings is not None
        if run.judge is None and settings.needs_rewards:
            raise ConfigError(
                Violation(
                    "environment",
                    "none is incompatible with the objective, which needs an environment that scores completions; "
                    "choose one, such as exact_match",
                )
            )
        count, size = len(data.train_prompts), settings.num_prompts_per_step
        if not count or count != len(data.train):
            raise ConfigError(Violation("data", "has no train_prompts for its training samples; choose data=prompts"))
        self._objective, self._settings, self._model, self._frozen = objective, settings, model, frozen
        self._run, self._data, self._judge, self._world = run, data, run.judge, run.world
        hparams = run.config.hparams
        self._per_gpu, self._pack_tokens = hparams.per_gpu_batch_size, pack_tokens
        self._shares_prompts = resolve_sharing(objective, model, is_compiled=hparams.torchcompile)
        self._loader = Loader(
            dataset=RowNumbers(count),
            order=data.order(run.seed),
            batch_size_at=lambda samples: size,
            per_gpu_batch_size=size,
        )
        self._decoding = Decoding(
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.generation_temperature,
            top_k=settings.generation_top_k,
            top_p=settings.generation_top_p,
            stop_ids=frozenset(data.stop_ids),
            seed=run.seed,
            stream=_STREAM,
            keeps_log_probs=True,
        )
        num_generating = math.ceil(settings.samples_per_rollout / settings.generation_batch_size)
        if num_generating < self._world.dp_size:
            message = "objective.generation_batch_size=%d leaves answers to only %d of %d ranks; lower it"
            log.warning(message, settings.generation_batch_size, num_generating, self._world.dp_size)
        self._context = context_of(model, data)
        _check_prompts(data, self._judge, self._context - self._decoding.max_new_tokens)
        self._update = 0  # index of the next update within the rollout; 0 starts a new rollout
        self._samples: dict[str, Tensor] = {}
        self._metrics: dict[str, float] = {}
        self._unrewarded = 0  # consecutive rollouts without any reward
        self._has_rewarded = False

    @classmethod
    def of(cls, objective: RolloutObjective, context: SourceContext) -> Self:
        """Build the source of an objective in the context of its run."""
        frozen = [context.frozen[name] for name in objective.recorded_models]
        return cls(objective, context.model, context, frozen=frozen, pack_tokens=context.pack_tokens)

    def next_window(self) -> Window:
        """Return the completions of the next update; generate a rollout first if necessary.

        Raises:
            ConfigError: the objective needs rewards, and the environment gives none; see `_check_rewards`.
        """
        if self._update == 0:
            self._roll_out()
        size = self._settings.samples_per_rollout // self._settings.updates_per_rollout
        first = self._update * size
        self._update = (self._update + 1) % self._settings.updates_per_rollout
        lengths = self._samples["length"][first : first + size]
        return Window(
            microbatches=self._microbatches(first, lengths),
            num_samples=size,
            num_tokens=int(lengths.sum()),
            metrics=self._metrics,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the prompts, the index of the next update within the rollout, and its metrics."""
        metrics = self._metrics if self._update else {}
        return {"prompts": self._loader.state_dict(), "update": self._update, "metrics": metrics}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict()`."""
        self._loader.load_state_dict(state["prompts"])
        self._update, self._metrics = read_count(state, "update"), dict(state["metrics"])

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the current rollout; empty if all its updates are done."""
        return dict(self._samples) if self._update else {}

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the tensors of a rollout."""
        self._samples = dict(tensors)

    def rewind(self, samples: int) -> None:
        """Do nothing: no position is counted in samples, and existing rollouts are not generated again."""

    def _roll_out(self) -> None:
        """Generate a rollout, score it and prepare it for the updates."""
        read = self._loader.next_window().microbatches[0]
        num_generations = self._settings.num_generations_per_prompt
        prompts = [self._data.train_prompts[row] for row in read["row"].tolist() for _ in range(num_generations)]
        keys = [
            position * num_generations + number
            for position in read["position"].tolist()
            for number in range(num_generations)
        ]
        longest = max(len(prompt.tokens) for prompt in prompts) + self._decoding.max_new_tokens - 1
        completions = Completions(len(prompts), longest)
        answers = dict[int, Completion]()
        size = self._settings.generation_batch_size
        own = find_share(len(prompts), size, self._world.dp_rank, self._world.dp_size)
        with torch.no_grad(), ExitStack() as stack:
            full_model = stack.enter_context(gathered(self._model))
            for model in self._frozen:
                stack.enter_context(gathered(model))
            batches = complete(
                full_model,
                prompts[own],
                keys[own],
                self._decoding,
                batch_size=size,
                context=self._context,
                world=self._world,
                autocast=self._run.autocast,
                record=self._objective.record,
                groups=torch.tensor(keys[own]) // num_generations if self._shares_prompts else None,
                tokenizer=self._data.tokenizer,
                heartbeat=self._run.heartbeat,
            )
            for batch in batches:
                place(completions, batch, own.start)
                if self._world.leads_share:
                    answers |= enumerate(self._judge_answers(batch.answers), own.start + batch.start)
        self._run.heartbeat("collecting answers")
        completions.share(self._world)
        self._prepare(completions, self._gather_answers(answers), torch.tensor(keys))

    def _judge_answers(self, answers: Sequence[Completion]) -> Sequence[Completion]:
        if self._judge is None:
            return answers
        judgements = self._judge.judge([answer.answer for answer in answers], self._run.heartbeat)
        return [replace(answer, judgement=judgement) for answer, judgement in zip(answers, judgements, strict=True)]

    def _gather_answers(self, answers: Mapping[int, Completion]) -> list[tuple[int, bool, Judgement]]:
        """Return length, truncation flag and judgement of every completion, gathered from all ranks.

        Raises:
            ConfigError: the objective needs rewards but the environment gives none; see `_check_rewards`.
        """
        local = {
            number: (answer.length, answer.answer.is_truncated, answer.judgement) for number, answer in answers.items()
        }
        by_number = {number: answer for part in gather(local, self._world) for number, answer in part.items()}
        ordered = [by_number[number] for number in range(len(by_number))]
        if self._judge is not None and self._settings.needs_rewards:
            self._check_rewards(self._judge.name, [judgement for _, _, judgement in ordered])
        return ordered

    def _check_rewards(self, environment: str, judgements: Sequence[Judgement]) -> None:
        """Raise if the environment failed on all answers before any reward, or gave none in 3 rollouts in a row."""
        if any(judgement.reward is not None for judgement in judgements):
            self._unrewarded, self._has_rewarded = 0, True
            return
        self._unrewarded += 1
        faults = [judgement.message for judgement in judgements if judgement.fault]
        is_broken = len(faults) == len(judgements) and not self._has_rewarded
        if is_broken or self._unrewarded == _MAX_UNREWARDED:
            reason = f"first: {faults[0]}" if faults else "all scores are None"
            rollouts = "a rollout" if is_broken else f"{_MAX_UNREWARDED} rollouts in a row"
            message = f"{environment} gave no reward for any answer of {rollouts} ({len(judgements)} each); {reason}"
            raise ConfigError(Violation("environment", message))

    def _prepare(self, completions: Completions, results: Sequence[tuple[int, bool, Judgement]], keys: Tensor) -> None:
        rewards = [math.nan if judgement.reward is None else judgement.reward for _, _, judgement in results]
        num_generations = self._settings.num_generations_per_prompt
        prepared = self._objective.prepare(
            Rollout(
                tokens=completions.tokens,
                targets=completions.targets,
                group=torch.arange(len(results)) // num_generations,
                rewards=torch.tensor(rewards, dtype=torch.float64),
                is_truncated=torch.tensor([is_truncated for _, is_truncated, _ in results]),
                sampler=completions.columns["sampler"],
                recorded={name: column for name, column in completions.columns.items() if name != "sampler"},
            )
        )
        num_new = (completions.targets != IGNORED_TARGET).sum(-1)
        self._samples = {
            "tokens": completions.tokens,
            "targets": completions.targets,
            "length": torch.tensor([length for length, _, _ in results]),
            "position": keys,
            **prepared.columns,
        }
        reward_metrics = {} if self._judge is None else _rewards([judgement for _, _, judgement in results])
        truncated = sum(is_truncated for _, is_truncated, _ in results) / len(results)
        statistics = {"truncated": truncated, "completion_tokens": float(num_new.double().mean())}
        self._metrics = reward_metrics | statistics | dict(prepared.metrics)

    def _microbatches(self, first: int, lengths: Tensor) -> list[Microbatch]:
        """Return this rank's microbatches of the completions from `first` on, one completion for each of `lengths`."""
        rank, ranks = self._world.dp_rank, self._world.dp_size
        if self._pack_tokens is not None:
            packs = [[first + i for i in pack] for pack in first_fit_decreasing(lengths.numpy(), self._pack_tokens)]
            dealt = deal(packs, per_gpu_batch_size=self._per_gpu, dp_rank=rank, dp_size=ranks)
            return [self._share_prompts(sorted(chain(*rows))) or self._pack_rows(rows) for rows in dealt]
        starts = range(first + rank * self._per_gpu, first + len(lengths), ranks * self._per_gpu)
        slices = [slice(start, start + self._per_gpu) for start in starts]
        all_numbers = range(len(self._samples["length"]))
        return [self._share_prompts(all_numbers[rows]) or self._select(rows) for rows in slices]

    def _share_prompts(self, numbers: Sequence[int]) -> Microbatch | None:
        """Return the completions with these row numbers in a row with shared prompts; None if they are not shared."""
        if not self._shares_prompts or not numbers:
            return None
        return share_prompts(
            self._samples, numbers, self._samples["position"] // self._settings.num_generations_per_prompt
        )

    def _select(self, rows: slice | list[int]) -> Microbatch:
        """Return the completions with these row numbers, padded to the longest of them."""
        longest = max([1, *self._samples["length"][rows].tolist()])
        return {
            name: (column[rows, :longest] if column.dim() > 1 else column[rows]).contiguous()
            for name, column in self._samples.items()
            if name != "length"
        }

    def _pack_rows(self, packs: Sequence[Pack]) -> Microbatch:
        """Return completions in packed rows; columns except tokens and targets keep one row for each completion."""
        numbers, lengths = [number for pack in packs for number in pack], self._samples["length"].tolist()
        document = dict(zip(numbers, range(len(numbers)), strict=True))

        def rows(fill: int, read: Callable[[int], Tensor]) -> Tensor:
            """Concatenate the values of each pack, padded with `fill`; an empty pack becomes one value `fill`."""
            parts = [[*map(read, pack)] or [torch.tensor([fill])] for pack in packs]
            return pad_sequence([torch.cat(row) for row in parts], batch_first=True, padding_value=fill)

        documents = rows(-1, lambda n: torch.full((lengths[n],), document[n]))
        return {
            **self._select(numbers),
            "tokens": rows(0, lambda n: self._samples["tokens"][n, : lengths[n]]),
            "targets": rows(IGNORED_TARGET, lambda n: self._samples["targets"][n, : lengths[n]]),
            "documents": documents,
            **find_bounds(documents),
        }


def find_share(count: int, batch_size: int, rank: int, num_ranks: int) -> slice:
    """Return the completions of a rollout that a data-parallel rank generates; empty if it generates none.

    Args:
        count: number of completions of the rollout.
        batch_size: maximum number of completions that a rank generates at a time.
        rank: index of the rank.
        num_ranks: number of data-parallel ranks.
    """
    num_generating = min(num_ranks, math.ceil(count / batch_size))
    first, last = (min(number, num_generating) * count // num_generating for number in (rank, rank + 1))
    return slice(first, last)


def _check_prompts(data: DataSplits, judge: Judge | None, max_tokens: int) -> None:
    prompts = data.train_prompts
    if long := [prompt for prompt in prompts if len(prompt.tokens) > max_tokens]:
        message = (
            f"leaves {max_tokens} of the model's positions for prompts, and {len(long)} of {len(prompts)} are longer"
        )
        raise ConfigError(Violation("objective.max_new_tokens", f"{message}; lower it, or set data.on_bad_row=skip"))
    if judge is None:
        return
    for name in judge.needs:
        if num_missing := sum(prompt.own_columns.get(name) is None for prompt in prompts):
            message = f"is {judge.name}, which reads the column {name} of prompts, but {num_missing} of {len(prompts)}"
            raise ConfigError(Violation("environment", f"{message} lack it; add it, or choose another environment"))


def _rewards(judgements: Sequence[Judgement]) -> dict[str, float]:
    """Return the metrics of a rollout: means of existing rewards and scores, share of missing rewards, fault counts."""
    rewards = [judgement.reward for judgement in judgements if judgement.reward is not None]
    metrics = {"reward": sum(rewards) / len(rewards)} if rewards else {}
    for name in sorted({name for judgement in judgements for name in judgement.scores}):
        values = [judgement.scores[name] for judgement in judgements if name in judgement.scores]
        metrics[f"reward_{name}"] = sum(values) / len(values)
    metrics["reward_missing"] = 1 - len(rewards) / len(judgements)
    for fault in sorted({judgement.fault for judgement in judgements} - {""}):
        metrics[f"reward_{fault}"] = float(sum(judgement.fault == fault for judgement in judgements))
    return metrics
