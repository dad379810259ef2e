"""Agreement of a classifier of real digits with the class labels of images that a diffusion run generated.

    python -m foundry hparams=diffusion scheduler=wsd hydra.run.dir=runs/digits
    python benchmarks/digits_agreement.py runs/digits

The classifier is 5-nearest-neighbor on scikit-learn's 1,797 images, whose pixels range from 0 to 16; there are 50
generated images of each class. Controls are held-out real images and pure noise.
"""

import sys
from typing import Any

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from sklearn.neighbors import KNeighborsClassifier  # type: ignore[import-untyped]
from torch import Tensor

from foundry.config.build import build
from foundry.engine.restore import restore


def agreement(classifier: Any, images: Tensor, labels: Tensor) -> float:
    """Return the fraction of images, (n, 1, 8, 8) in [-1, 1], that the classifier assigns to their label."""
    return float((classifier.predict(((images + 1) * 8).reshape(len(images), 64).numpy()) == labels.numpy()).mean())


def main(run_dir: str) -> None:
    restored = restore(run_dir, "last", ema=True)
    objective = build(restored.config.objective)
    samples = objective.generate(restored.model, restored.data, restored.device, samples_per_class=50, seed=1)
    pixels, labels = load_digits(return_X_y=True)
    classifier = KNeighborsClassifier(5).fit(pixels, labels)
    odd = KNeighborsClassifier(5).fit(pixels[::2], labels[::2])
    noise = torch.randn(500, 1, 8, 8, generator=torch.Generator().manual_seed(0)).clamp(-1, 1)
    print("| images | agreement |\n|---|---|")
    print(f"| 500 drawn | {agreement(classifier, samples.images.cpu(), samples.labels.cpu()):.1%} |")
    print(f"| real, held out from the classifier | {float((odd.predict(pixels[1::2]) == labels[1::2]).mean()):.1%} |")
    print(f"| noise | {agreement(classifier, noise, samples.labels.cpu()):.1%} |")


if __name__ == "__main__":
    main(sys.argv[1])
