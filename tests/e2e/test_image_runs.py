"""Diffusion runs on a folder of images."""

import json

import numpy as np
import pytest
from PIL import Image
from support.tiny import TINY_DIT

RUN = [*TINY_DIT, "data=images", "data.image_size=8", "data.mirror=true", "data.held_out=0.2", "tracking=none"]
RUN += ["scheduler.horizon=6", "hparams.max_steps=6"]


@pytest.fixture
def pictures(run_command):
    for label, name in enumerate(["cats", "dogs"]):
        (run_command.cwd / "pictures" / name).mkdir(parents=True)
        for number in range(20):
            pixels = np.random.default_rng((label, number)).integers(0, 256, (10, 14, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(run_command.cwd / "pictures" / name / f"{number}.png")
    return run_command.cwd / "pictures"


def losses(folder):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[record[name] for record in records if name in record] for name in ("loss", "val_loss")]


def test_image_run_trains_resumes_after_moving_the_data_and_is_sampled(run_command, pictures):
    run_command(*RUN, "data.path=pictures", "hydra.run.dir=whole")
    plan = json.loads((run_command.cwd / "whole" / "plan.json").read_text())
    counts = {name: plan["notes"][name] for name in ("train_images", "validation_images", "classes")}
    assert counts == {"train_images": 32, "validation_images": 8, "classes": "cats, dogs"}
    assert plan["samples_per_epoch"] == 64

    run_command(*RUN, "hparams.max_steps=3", "data.path=pictures", "hydra.run.dir=halves")
    pictures.rename(run_command.cwd / "moved")
    run_command(*RUN, "data.path=moved", "hydra.run.dir=halves")
    assert losses(run_command.cwd / "halves")[0] == losses(run_command.cwd / "whole")[0]

    out, _ = run_command("run=halves", "labels=[1,0,1]", "out=drawn", module="foundry.sample")
    assert (run_command.cwd / "drawn.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "drawn.png" in out

    (run_command.cwd / "moved" / "cats" / "3.png").write_bytes(b"GIF89a")
    _, message = run_command(*RUN, "data.path=moved", "hydra.run.dir=broken", code=2)
    assert "data.path: has moved/cats/3.png, which is not an image: cannot identify image file" in message


@pytest.mark.long
def test_data_worker_does_not_change_the_losses_of_an_image_run(run_command, shell, pictures):
    run_command(*RUN, "data.path=pictures", "hydra.run.dir=whole")
    shell.run(*RUN, "data.path=pictures", "data.num_workers=1", "hydra.run.dir=ahead")
    assert losses(run_command.cwd / "ahead") == losses(run_command.cwd / "whole")
