"""Answers about images are drawn as a grid with one cell per answer, with any characters."""

import numpy as np
import pytest
import torch
from PIL import Image

from foundry.generation.decoding import Decoding, generate
from foundry.generation.picture_answers import PictureAnswers


def answers(count, **changes):
    images = torch.arange(count * 3 * 8 * 8).reshape(count, 3, 8, 8).to(torch.uint8)
    texts = {"questions": ("which ?",) * count, "answers": ("here",) * count, "truths": ("here",) * count}
    return PictureAnswers(images=images, **{**texts, **changes})


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8])
def test_answer_grid_has_one_cell_per_answer(count, tmp_path):
    file = answers(count).save(tmp_path / "found")
    assert file == tmp_path / "found.png"
    with Image.open(file) as drawn:
        columns, rows = min(4, count), -(-count // 4)
        assert drawn.size[0] == pytest.approx(columns * 2.2 * 120, abs=2)
        assert drawn.size[1] == pytest.approx(rows * 2.2 * 1.45 * 120, abs=2)


def test_correct_answer_is_green_and_wrong_answer_red(tmp_path):
    def colours(**changes):
        grey = answers(1, **changes)
        with Image.open(
            PictureAnswers(torch.full((1, 3, 8, 8), 128, dtype=torch.uint8), *texts(grey)).save(tmp_path / "one")
        ) as drawn:
            red, green, _ = np.asarray(drawn.convert("RGB")).astype(int).transpose(2, 0, 1)
        return int((green - red > 60).sum()), int((red - green > 60).sum())

    def texts(found):
        return found.questions, found.answers, found.truths

    right, wrong, unknown = colours(), colours(truths=("there",)), colours(truths=(None,))
    assert right[0] > 50 > right[1]
    assert wrong[1] > 50 > wrong[0]
    assert max(unknown) < 50


@pytest.mark.parametrize("answer", ["", "$x_1$ $", "a\nb\0c", "\\frac{", "x" * 500, "\ud800", "日本 \u202e"])
def test_answer_with_any_characters_can_be_drawn(answer, tmp_path):
    found = answers(2, answers=(answer, "here"))
    assert found.save(tmp_path / "found").stat().st_size > 1000
    assert found.text.startswith("which ?\nanswer: ")


def test_answer_text_includes_the_reference_if_known():
    found = answers(2, truths=("there", None))
    assert found.text == "which ?\nanswer: here\nreference: there\n\nwhich ?\nanswer: here"


def test_each_prompt_is_continued_with_its_own_image():
    from foundry.models.vlm import PrefixVLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    model = PrefixVLM(vocab_size=61, max_seq_len=12, image_size=16, init_std=0.3, **sizes)
    images = [torch.randint(256, (1, 3, 16, 16), dtype=torch.uint8) for _ in range(3)]
    decoding, given = Decoding(max_new_tokens=4), {"context": 12, "device": torch.device("cpu")}
    together = generate(model, [[1, 2], [1, 2], [5]], decoding, images=images, **given)
    alone = [
        generate(model, [prompt], decoding, images=[image], **given)[0]
        for prompt, image in zip([[1, 2], [1, 2], [5]], images, strict=True)
    ]
    assert together == alone
    assert together[0] != together[1]
    model.eval()
    tokens = torch.tensor([[1, 2]])
    for token in together[0].tokens:
        assert model(tokens, images=images[0][None], return_logits=True).logits[0, -1].argmax() == token
        tokens = torch.cat((tokens, torch.tensor([[token]])), dim=1)
