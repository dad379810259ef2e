"""Conversations about images: the image of each row, and errors of broken rows."""

import errno
import json
from functools import partial
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from foundry.config.schemas.data import OnBadRow
from foundry.core.errors import ConfigError
from foundry.data.conversations.image_chats import image_chat_files
from foundry.data.images import pictures


def picture(colour, size=(20, 12), kind="PNG"):
    stream = BytesIO()
    Image.new("RGB", size, colour).save(stream, format=kind)
    return stream.getvalue()


COLOURS = [(200, 0, 0), (0, 200, 0), (0, 0, 200), (90, 90, 90)]


@pytest.fixture
def folder(tmp_path):
    """Write eight rows about four images, two rows each."""
    (tmp_path / "seen").mkdir()
    rows = []
    for number in range(8):
        name = f"seen/{number % 4}.{'png' if number % 2 else 'jpg'}"
        (tmp_path / name).write_bytes(picture(COLOURS[number % 4], kind="PNG" if number % 2 else "JPEG"))
        rows.append({"image": name, "prompt": f"colour {number} ?", "completion": f"it is {number % 4}"})
    write(tmp_path, rows)
    return tmp_path


def write(folder, rows):
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def rows_of(folder):
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture
def read(folder):
    return partial(
        image_chat_files,
        seed=0,
        path=str(folder / "rows.jsonl"),
        image_size=16,
        seq_len=64,
        vocab_size=257,
        tokenizer=None,
        held_out=0.25,
        cache_dir=str(folder / "cache"),
    )


def assert_each_has_its_picture(data, count):
    seen = 0
    for split in (data.train, data.validation):
        for index in range(len(split)):
            sample = split[index]
            text = data.tokenizer.decode(sample["targets"][sample["targets"] >= 0].tolist(), skip_special_tokens=True)
            wanted = torch.tensor(COLOURS[int(text[-1])])
            assert sample["images"].shape == (1, 3, 16, 16)
            assert (sample["images"][0].long() - wanted[:, None, None]).abs().max() <= 3  # JPEG is lossy.
            seen += 1
    assert seen == count


def test_image_path_is_relative_to_the_row_file(read, folder, monkeypatch):
    data = read()
    assert (len(data.train), len(data.validation)) == (6, 2)
    assert_each_has_its_picture(data, 8)
    assert data.train.images.shape == (4, 3, 16, 16)  # Four images for eight rows.
    monkeypatch.chdir(folder)
    assert read(path="rows.jsonl").fingerprint == data.fingerprint


def test_changed_image_or_size_changes_the_fingerprint(read, folder):
    first = read()
    assert read(image_size=24).fingerprint != first.fingerprint
    (folder / "seen/1.png").write_bytes(picture((1, 2, 3)))
    changed = read()
    assert changed.fingerprint != first.fingerprint
    assert changed.content != first.content


def test_validation_image_path_is_relative_to_the_validation_file(read, folder):
    other = folder / "other"
    (other / "seen").mkdir(parents=True)
    (other / "seen/0.jpg").write_bytes(picture(COLOURS[3]))
    write(other, [{"image": "seen/0.jpg", "prompt": "?", "completion": "it is 3"}])
    data = read(validation_path=str(other / "rows.jsonl"))
    assert (len(data.train), len(data.validation)) == (8, 1)
    assert_each_has_its_picture(data, 9)


WRONG = [
    ({"image": None}, "has no image"),
    ({"image": 3}, "has int as image, not a path"),
    ({"image": "seen/9.png"}, "has image seen/9.png, which is not a file"),
    ({"image": "seen"}, "has image seen, which is not a file"),
    ({"image": "broken.png"}, "has image broken.png, which is not an image"),
    ({"image": "seen/\0.png"}, "which "),
    ({"image": "denied.png"}, "has image denied.png, which cannot be read: Permission denied"),
    ({"completion": " "}, "has an empty answer"),
    ({"completion": "x" * 99}, "more than data.seq_len=64"),
]


@pytest.mark.parametrize(("change", "message"), WRONG)
def test_bad_image_row_is_reported_by_line_or_skipped(read, folder, change, message, monkeypatch):
    (folder / "broken.png").write_bytes(b"no picture")
    (folder / "denied.png").write_bytes((folder / "seen/0.jpg").read_bytes())

    def open_regular(file):
        if file.name == "denied.png":
            raise PermissionError(errno.EACCES, "Permission denied", str(file))
        return file

    monkeypatch.setattr(pictures, "require_regular", open_regular)
    rows = rows_of(folder)
    rows[2] |= change
    write(folder, rows)
    with pytest.raises(ConfigError, match=r"rows\.jsonl:3 ") as caught:
        read()
    assert message in str(caught.value)
    assert_each_has_its_picture(read(on_bad_row=OnBadRow.skip), 7)


def test_wide_image_is_fitted_whole_into_the_square(read, folder):
    pixels = np.zeros((32, 64, 3), dtype=np.uint8)
    pixels[:16, :32] = 255
    Image.fromarray(pixels).save(folder / "seen/0.jpg", format="PNG")  # The suffix is ignored.
    data = read()
    wide = next(data.train.images[n] for n in range(4) if data.train.images[n].max() == 255)
    assert (wide[:, 1:7, 1:7] == 255).all()
    assert (wide[:, 9:, :] == 0).all()
    assert (wide[:, :, 9:] == 0).all()
