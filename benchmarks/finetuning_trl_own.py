"""foundry's side of finetuning_trl.py: `run()` of a composed configuration, and the samples for TRL in the same order.

python benchmarks/finetuning_trl_own.py JOB.json
"""

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from meter import Meter

from foundry import compose, run
from foundry.data.order import GlobalOrder
from foundry.engine.columns import join_columns
from foundry.parts.data import build_data


class Measured:
    """Observer that measures every step of a run."""

    def __init__(self, num_answers: int | None) -> None:
        self.meter, self.losses, self.rewards = Meter(), list[float](), list[float]()
        self._num_answers, self._tokens = num_answers, 0

    def on_start(self, event: Any) -> None:
        self.meter.start()

    def on_step(self, event: Any) -> None:
        if self._num_answers is None:
            tokens, self._tokens = event.tokens - self._tokens, event.tokens
        else:
            tokens = round(event.metrics["completion_tokens"] * self._num_answers)
            self.rewards.append(event.metrics["reward"])
        self.meter.step(tokens)
        self.losses.append(event.loss)

    def on_evaluation(self, event: Any) -> None:
        """Do nothing: only training is measured."""

    def on_end(self, event: Any) -> None:
        """Do nothing."""


def timing_reference(meter: Meter) -> AbstractContextManager[Any]:
    """Return a context that times the reference model's pass over all pairs before the first step of a DPO run."""

    def timed(*arguments: Any) -> Any:
        with meter.preparing():
            return join_columns(*arguments)

    return patch("foundry.engine.trained_models.join_columns", timed)


def write_order(job: dict[str, Any], file: Path) -> None:
    """Write the samples of all steps in foundry's order, in the format of TRL's trainers."""
    config = compose(job["overrides"])
    data: Any = build_data(config)
    order = GlobalOrder(num_samples=len(data.train), fingerprint=data.fingerprint, seed=config.hparams.seed)
    indices = order.indices(range(job["steps"] * job["read_each_step"])).tolist()
    rows, source = list[dict[str, Any]](), [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    for index in indices:
        if job["method"] == "grpo":
            prompt = data.train_prompts[index]
            text = data.tokenizer.decode(prompt.tokens, skip_special_tokens=False)
            rows.append({**prompt.own_columns, "prompt": text, "tokens": len(prompt.tokens)})
        elif job["method"] == "sft":
            begin, end = data.train.offsets[index : index + 2].tolist()
            trained = data.train.trained[begin:end].astype(int).tolist()
            rows.append({"input_ids": data.train.tokens[begin:end].tolist(), "completion_mask": trained})
        else:
            row = source[index]
            rows.append({**row, "prompt": f"user: {row['prompt']}\nassistant: "})
    file.write_text(json.dumps(rows))


def main() -> None:
    """Run one job."""
    job = json.loads(Path(sys.argv[1]).read_text())
    folder = Path(job["folder"])
    if job["only_order"]:
        write_order(job, folder / "order.json")
        return
    measured = Measured(job["num_answers"])
    with timing_reference(measured.meter):
        run(compose(job["overrides"]), folder / "run", observers=[measured])
    more = {"losses": measured.losses, "rewards": measured.rewards}
    measured.meter.write(folder / "measured.json", 0, **more)


if __name__ == "__main__":
    main()
