"""Image data without a simulator: tokens encode the brightness of the image."""

import torch
from torch.utils.data import Dataset

from foundry.data.splits import DataSplits


class PictureTokens(Dataset):
    """Images of random brightness, which determines the tokens; sample i has 1 + i % seq_len targets."""

    def __init__(self, num_samples, sizes, seed):
        generator = torch.Generator().manual_seed(seed)
        seq_len, vocab_size, size = sizes["seq_len"], sizes["vocab_size"], sizes["image_size"]
        brightness = torch.randint(vocab_size, (num_samples, 1), generator=generator)
        self.tokens = (brightness + torch.arange(seq_len + 1)) % vocab_size
        noise = torch.randint(8, (num_samples, 1, 3, size, size), generator=generator)
        self.images = (noise + 4 * brightness[..., None, None, None]).to(torch.uint8)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        targets = self.tokens[index, 1:].clone()
        targets[index % len(targets) + 1 :] = -100
        return {"tokens": self.tokens[index, :-1], "targets": targets, "images": self.images[index]}


def picture_tokens(*, seed, **sizes):
    return DataSplits(
        train=PictureTokens(96, sizes, 1),
        validation=PictureTokens(19, sizes, 2),
        fingerprint="pictures",
        tokens_per_sample=sizes["seq_len"],
    )
