"""Runs on a weighted mixture of two sources, one with a nested text field."""

import json

import pytest
from support.composition import configure
from support.outcome import losses
from support.small_text import RUN, SMALL, write_text

from foundry.engine.train import train
from foundry.run_dir.checkpoints import find

SHARES = [*RUN, *SMALL, "data.path=[text.txt,rows.jsonl]", "data.weights=[0.7,0.3]", "data.text_field=message.text"]
SHARES += ["scheduler.horizon=20", "checkpoint.interval=5"]


@pytest.mark.long
@pytest.mark.distributed
def test_mixture_run_resumes_on_more_ranks_and_refuses_other_weights(shell):
    write_text(shell.cwd)
    rows = [{"message": {"text": f"{n} plus {n} is {2 * n}."}} for n in range(300)]
    (shell.cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shell.run(*SHARES, "hparams.max_steps=20", "hydra.run.dir=whole")
    sources = json.loads((shell.cwd / "whole" / "plan.json").read_text())["notes"]["sources"]
    assert [(source["path"], source["share"]) for source in sources] == [("text.txt", 0.7), ("rows.jsonl", 0.3)]

    shell.run(*SHARES, "hparams.max_steps=10", "hydra.run.dir=halves")
    ahead = ["data.num_workers=1", "distributed=ddp", "distributed.nproc_per_node=2"]
    other = [word.replace("0.7,0.3", "0.6,0.4") for word in SHARES]
    _, message = shell.run(*other, "hparams.max_steps=20", "hydra.run.dir=halves", code=2)
    assert "data.weights" in message
    scaled = [word.replace("0.7,0.3", "14,6") for word in SHARES]
    shell.run(*scaled, *ahead, "hparams.max_steps=20", "hydra.run.dir=halves")
    assert losses(shell.cwd / "halves") == pytest.approx(losses(shell.cwd / "whole"), rel=1e-5)


@pytest.mark.long
def test_mixture_run_with_proportional_weights_resumes_bit_for_bit(tmp_path):
    write_text(tmp_path)
    (tmp_path / "more.txt").write_text("".join(f"{n} is more than {n - 1}.\n" for n in range(1000)))
    words = [*RUN, *SMALL, f"data.path=[{tmp_path / 'text.txt'},{tmp_path / 'more.txt'}]"]
    words += ["scheduler.horizon=4", "checkpoint.interval=2"]

    def trained(name, weights, steps):
        config = configure(*words, f"data.weights={weights}", f"hparams.max_steps={steps}")
        return find(train(config, tmp_path / name).run_dir) / "shard-00000.safetensors"

    whole = trained("whole", "[0.7,0.3]", 4).read_bytes()
    trained("halves", "[0.7,0.3]", 2)
    assert trained("halves", "[7,3]", 4).read_bytes() == whole
