"""A run over two sources in given shares, from one of which it reads nested text."""

import json

import pytest
from support.outcome import losses
from support.small_text import RUN, SMALL, write_text

SHARES = [*RUN, *SMALL, "data.path=[text.txt,rows.jsonl]", "data.weights=[0.7,0.3]", "data.text_field=message.text"]
SHARES += ["scheduler.horizon=20", "checkpoint.interval=5"]


@pytest.mark.long
@pytest.mark.distributed
def test_it_is_resumed_on_more_ranks_that_read_ahead_and_other_shares_are_other_data(shell):
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
    shell.run(*SHARES, *ahead, "hparams.max_steps=20", "hydra.run.dir=halves")
    assert losses(shell.cwd / "halves") == pytest.approx(losses(shell.cwd / "whole"), rel=1e-5)
