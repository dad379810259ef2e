"""Generated images are saved as one image: a grid with labeled rows."""

import torch
from matplotlib.image import imread

from foundry.generation.image_samples import ImageSamples


def picture(tmp_path, images, labels):
    file = ImageSamples(images=images, labels=torch.tensor(labels)).save(tmp_path / "samples")
    assert file == tmp_path / "samples.png"
    return torch.from_numpy(imread(file))[..., :3]


def test_image_grid_has_one_row_per_class(tmp_path):
    images = torch.full((5, 1, 8, 8), 1.0)
    found = picture(tmp_path, images, [3, 3, 3, 7, 7])
    cell, gap = 64, 8
    assert found.shape == (2 * (cell + gap) + gap, cell + 3 * (cell + gap) + gap, 3)
    black = found[:, cell:].sum(-1) == 0
    assert black.sum() == 5 * cell * cell
    assert black[gap : gap + cell, gap : gap + cell].all()
    assert not black[gap + cell + gap :, -(gap + cell) :].any()


def test_image_grid_scales_pixels_without_interpolation(tmp_path):
    images = torch.full((1, 1, 8, 8), -1.0)
    images[0, 0, 2, 5] = 1.0
    found = picture(tmp_path, images, [0])[8:72, 64 + 8 : 64 + 72]
    assert found[2 * 8 : 3 * 8, 5 * 8 : 6 * 8].max() == 0
    assert (found == 1).all(-1).sum() == 63 * 64


def test_image_grid_rows_are_labeled(tmp_path):
    found = picture(tmp_path, torch.zeros(10, 1, 8, 8), list(range(10)))
    for row in range(10):
        label = found[8 + row * 72 : 72 + row * 72, :64]
        assert label.min() < 0.5


def test_image_grid_keeps_colors(tmp_path):
    images = torch.tensor([1.0, -1.0, 0.0]).reshape(1, 3, 1, 1).expand(1, 3, 16, 16)
    centre = picture(tmp_path, images, [0])[40, 64 + 40]
    torch.testing.assert_close(centre, torch.tensor([1.0, 0.0, 0.5]), atol=0.01, rtol=0)


def test_large_images_are_not_enlarged(tmp_path):
    assert picture(tmp_path, torch.zeros(1, 1, 80, 80), [0]).shape == (80 + 20, 80 + 80 + 20, 3)
