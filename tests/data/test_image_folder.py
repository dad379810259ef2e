"""An image folder with one subfolder per class."""

import errno
import os
import pickle
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from foundry.config.schemas.data import PictureFit
from foundry.core.errors import ConfigError
from foundry.data.images import pictures
from foundry.data.images.image_folder import Pictures, image_folder
from foundry.data.loader import Loader

SIZE, PER_CLASS = 12, 6


def pixels(key):
    return np.random.default_rng(key).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "pictures"
    for label, name in enumerate(["zebra", "an owl", "Élan"]):
        (made / name).mkdir(parents=True)
        for number in range(PER_CLASS):
            Image.fromarray(pixels((label, number))).save(made / name / f"{number}.png")
    return made


@pytest.fixture
def read(folder, tmp_path):
    def call(**changed):
        own = {"image_size": SIZE, "num_channels": 3, "num_classes": 3, "fit": PictureFit.crop, "mirror": False}
        own |= {"seed": 1, "path": str(folder), "held_out": 0.34, "cache_dir": str(tmp_path / "cache")}
        return image_folder(**own | changed)

    return call


def all_of(dataset):
    batch = dataset.batch(range(len(dataset)))
    return batch["images"], batch["labels"]


def in_folder(images):
    """Return the set of images as bytes, for comparison with the written pixels."""
    return {((image + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).numpy().tobytes() for image in images}


def test_images_are_read_exactly_and_classes_are_sorted_folder_names(read):
    data = read()
    assert data.class_names == ("an owl", "zebra", "Élan")
    assert (len(data.train), len(data.validation)) == (12, 6)
    found = {}
    for split in (data.train, data.validation):
        images, labels = all_of(split)
        assert (images.dtype, labels.dtype) == (torch.float32, torch.int64)
        assert images.shape[1:] == (3, SIZE, SIZE)
        assert sorted(set(labels.tolist())) == [0, 1, 2]
        for label in range(3):
            found.setdefault(label, set()).update(in_folder(images[labels == label]))
    for label, key in ((0, 1), (1, 0), (2, 2)):
        assert found[label] == {pixels((key, number)).tobytes() for number in range(PER_CLASS)}


def test_mirror_doubles_the_training_split_only(read):
    plain, both = read(), read(mirror=True)
    images, labels = all_of(both.train)
    original, classes = all_of(plain.train)
    assert torch.equal(images, torch.cat([original, original.flip(-1)]))
    assert torch.equal(labels, classes.repeat(2))
    assert torch.equal(all_of(both.validation)[0], all_of(plain.validation)[0])
    assert both.fingerprint != plain.fingerprint
    one = both.train[len(plain.train) + 3]
    assert torch.equal(one["images"], images[len(plain.train) + 3])
    assert one["labels"].shape == ()


def test_added_images_do_not_change_which_old_ones_are_held_out_first(folder, read):
    """Images are held out by name: the old images held out now are a subset or a superset of those held out before."""

    def held_out():
        images, labels = all_of(read().validation)
        return [in_folder(images[labels == label]) for label in range(3)]

    before, keys = held_out(), {name: label for label, name in enumerate(["zebra", "an owl", "Élan"])}
    old = {pixels((label, number)).tobytes() for label in range(3) for number in range(PER_CLASS)}
    for number in range(PER_CLASS, 2 * PER_CLASS):
        for name, label in keys.items():
            Image.fromarray(pixels((label, number))).save(folder / name / f"a{number}.png")  # sorts first
    after = held_out()
    assert [len(found) for found in after] == [2 * len(found) for found in before]
    for one, other in zip(before, after, strict=True):
        kept = other & old
        assert kept <= one or one <= kept


def test_decoded_images_are_cached_until_a_file_changes(folder, read, tmp_path):
    first = read()
    kept = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.npy")}
    assert len(kept) == 1
    assert read(seed=2).fingerprint == first.fingerprint
    assert kept == {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*.npy")}
    Image.fromarray(pixels(99)).save(folder / "zebra" / "0.png")
    assert read().fingerprint != first.fingerprint
    assert len(list((tmp_path / "cache").rglob("*.npy"))) == 2


def test_pickled_image_dataset_does_not_contain_the_pixels(read):
    train = read().train
    assert len(pickle.dumps(train)) < 2000
    assert torch.equal(all_of(pickle.loads(pickle.dumps(train)))[0], all_of(train)[0])


def only(read, folder, picture, name="a.png", **changed):
    """Return the decoded pixels of one image; two copies of it form a class."""
    shutil.rmtree(folder)
    folder.mkdir()
    for copy in "ab":
        picture.save(folder / f"{copy}{name[1:]}", **({"exif": picture.getexif()} if picture.getexif() else {}))
    data = read(num_classes=1, held_out=0.5, **changed)
    assert data.class_names == (folder.name,)
    return ((data.train[0]["images"] + 1) * 127.5).round().to(torch.uint8)


def test_image_modes_are_converted_to_the_requested_channels(folder, read):
    grey = Image.fromarray(pixels(0)[..., 0])
    assert torch.equal(only(read, folder, grey), torch.from_numpy(pixels(0)[..., 0]).expand(3, SIZE, SIZE))
    assert torch.equal(only(read, folder, grey, num_channels=1)[0], torch.from_numpy(pixels(0)[..., 0]))
    deep = Image.fromarray(pixels(0)[..., 0].astype(np.uint16) * 257)
    assert torch.equal(only(read, folder, deep, num_channels=1)[0], torch.from_numpy(pixels(0)[..., 0]))
    see_through = np.dstack([pixels(0), np.zeros((SIZE, SIZE), np.uint8)])
    assert (only(read, folder, Image.fromarray(see_through)) == 255).all()
    palette = Image.fromarray(pixels(0)).quantize(8)
    expected = np.array(palette.convert("RGB")).transpose(2, 0, 1)
    assert torch.equal(only(read, folder, palette), torch.from_numpy(expected))
    exact = only(read, folder, Image.fromarray(pixels(0)), "a.webp")
    assert exact.shape == (3, SIZE, SIZE)


def test_exif_orientation_is_applied(folder, read):
    upright = np.zeros((SIZE, SIZE, 3), np.uint8)
    upright[: SIZE // 2] = 255
    photograph = Image.fromarray(np.rot90(upright, 1))
    photograph.getexif()[0x0112] = 6  # Rotate clockwise.
    found = only(read, folder, photograph, "a.jpg").float().mean(0)
    assert found[: SIZE // 2 - 1].mean() > 250
    assert found[SIZE // 2 + 1 :].mean() < 5


def test_wide_image_is_center_cropped_or_stretched(folder, read):
    wide = np.zeros((SIZE, 3 * SIZE, 3), np.uint8)
    wide[:, SIZE : 2 * SIZE] = 255
    assert (only(read, folder, Image.fromarray(wide)) == 255).all()
    stretched = only(read, folder, Image.fromarray(wide), fit=PictureFit.stretch)
    assert (stretched[:, :, 0] == 0).all()
    assert (stretched[:, :, SIZE // 2] == 255).all()
    assert stretched.shape == (3, SIZE, SIZE)


def test_large_image_is_downsampled_by_averaging(folder, read):
    """Nearest-neighbor sampling would turn uniformly gray noise into visible noise."""
    noise = np.random.default_rng(1).integers(0, 256, (16 * SIZE, 16 * SIZE, 3), dtype=np.uint8)
    for suffix in ("png", "jpg", "jpeg", "JPG"):
        found = only(read, folder, Image.fromarray(noise), f"a.{suffix}").float()
        assert found.shape == (3, SIZE, SIZE)
        assert (found - 127.5).abs().max() < 40


def test_non_image_files_are_skipped_with_a_warning(folder, read, caplog):
    (folder / "zebra" / "deeper").mkdir()
    (folder / "zebra" / "0.png").rename(folder / "zebra" / "deeper" / "0.png")
    (folder / "zebra" / "notes.txt").touch()
    (folder / "zebra" / ".DS_Store").touch()
    (folder / ".cache").mkdir()
    data = read()
    assert len(data.train) + len(data.validation) == 3 * PER_CLASS
    assert "1 file in" in caplog.text


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            lambda folder: (folder / "zebra" / "0.png").write_bytes(b"no"),
            r"data.path: has .*zebra/0.png, which is not ",
        ),
        (
            lambda folder: (folder / "zebra" / "0.png").write_bytes(b""),
            r"data.path: has .*zebra/0.png, which is not an im",
        ),
        (
            lambda folder: cut(folder / "zebra" / "0.png"),
            r"data.path: has .*zebra/0.png, which is not an image: image f",
        ),
        (lambda folder: (folder / "new").mkdir(), r"data.num_classes: is 3 but .* has 4 folders; leave it out"),
        (lambda folder: empty(folder / "zebra"), r"data.path: has no image in .*zebra \(.png, .jpg, .jpeg, .webp\)"),
        (lambda folder: empty(folder / "zebra", but="1.png"), r"data.held_out: is 0.34, which keeps 0 of the 1 images"),
        (lambda folder: shutil.rmtree(folder), r"data.path: is .*pictures, which does not exist"),
        (lambda folder: broken_link(folder / "zebra" / "0.png"), r"data.path: has .*zebra/0.png, which cannot be read"),
        (lambda folder: os.mkfifo(folder / "zebra" / "9.png"), r"data.path: has .*zebra/9.png, .* is a named pipe"),
        (lambda folder: (folder / "zebra" / "9.png").symlink_to("/dev/zero"), r"has .*9.png, .* is a device"),
    ],
)
def test_unreadable_image_folder_error_names_file_and_config_key(harm, message, folder, read):
    harm(folder)
    with pytest.raises(ConfigError, match=message):
        read()


def cut(file):
    file.write_bytes(file.read_bytes()[:200])


def empty(folder, but=None):
    for file in folder.iterdir():
        if file.name != but:
            file.unlink()


def broken_link(file):
    file.unlink()
    file.symlink_to("nowhere")


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 9), st.booleans(), st.lists(st.integers(0, 10**6), max_size=12))
def test_image_batch_equals_its_items(count, mirror, indices):
    images = np.arange(10 * 2 * 4, dtype=np.uint8).reshape(10, 1, 2, 4)
    dataset = Pictures(images, np.arange(10), np.arange(10)[-count:], mirror=mirror)
    indices = [index % len(dataset) for index in indices]
    batch = dataset.batch(indices)
    assert batch["images"].shape == (len(indices), 1, 2, 4)
    for row, index in enumerate(indices):
        assert torch.equal(batch["images"][row], dataset[index]["images"])
        assert batch["labels"][row] == 10 - count + index % count


def shifted(read, **changes):
    data = read(random_crop=2, **changes)
    return data, Loader(dataset=data.train, order=data.order(3), batch_size_at=lambda samples: 8, per_gpu_batch_size=4)


def test_random_crops_depend_on_position_and_seed_and_not_on_ranks(read):
    data, alone = shifted(read)
    images = {}
    for _ in range(4):
        for microbatch in alone.next_window().microbatches:
            images |= dict(zip(microbatch["position"].tolist(), microbatch["images"], strict=True))
    ranks = [
        Loader(
            dataset=data.train,
            order=data.order(3),
            batch_size_at=lambda samples: 8,
            per_gpu_batch_size=2,
            dp_rank=rank,
            dp_size=2,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        rank.load_state_dict({"samples": 16, "skipped": 0})
        for microbatch in [m for _ in range(2) for m in rank.next_window().microbatches]:
            for position, image in zip(microbatch["position"].tolist(), microbatch["images"], strict=True):
                assert torch.equal(image, images[position])
    other = read(random_crop=2, seed=2).train.batch_at(range(12), range(12))["images"]
    assert not torch.equal(other, data.train.batch_at(range(12), range(12))["images"])


def test_random_crop_pads_by_repeating_edges_and_skips_validation(read):
    data, _ = shifted(read)
    plain, seen = data.train.batch([0] * 200)["images"][0], set()
    wide = torch.nn.functional.pad(plain[None], (2, 2, 2, 2), mode="replicate")[0]
    cuts = {wide[:, d : d + SIZE, r : r + SIZE].numpy().tobytes(): (d, r) for d in range(5) for r in range(5)}
    for image in data.train.batch_at([0] * 400, range(400))["images"]:
        seen.add(cuts[image.numpy().tobytes()])
    assert len(seen) == len(cuts) == 25
    assert torch.equal(data.train[0]["images"], plain)
    assert in_folder(all_of(data.validation)[0]) == in_folder(all_of(read().validation)[0])
    assert read(random_crop=0).fingerprint == read().fingerprint != data.fingerprint


def test_permission_error_of_an_image_is_a_sentence(folder, read, monkeypatch):
    def deny(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(pictures, "require_regular", deny)
    with pytest.raises(ConfigError, match=r"0\.png, which cannot be read: Permission denied; remove or rename it$"):
        read()
