import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.divergences import divergence
from torch import nn

from foundry.core.errors import ConfigError
from foundry.models.transformer import Transformer
from foundry.objectives.sft import SFT
from foundry.parts.objective import check_forward
from foundry.tasks.post_training.objectives.distillation import Distillation
from foundry.tasks.post_training.schemas.distillation import Divergence, OutsideTopK

OPTIONS = [
    {},
    {"divergence": Divergence.reverse, "ce_ratio": 0.0, "temperature": 2.0},
    {"divergence": Divergence.mixed, "mixed_kl_weight": 0.3, "top_k": 5},
    {"divergence": Divergence.jsd, "jsd_beta": 0.2, "top_k": 5, "outside_top_k": OutsideTopK.renormalize},
    {"top_k": 5, "outside_top_k": OutsideTopK.zero, "ce_ratio": 0.2},
]


def make_model(seed=0, vocab_size=50, **changes):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2}
    return Transformer(vocab_size=vocab_size, max_seq_len=12, init_std=0.3, **sizes, **changes)


def microbatch(batch=5, seq=10, seed=0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (batch, seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < 0.3] = -100
    return {"tokens": tokens[:, :-1], "targets": targets, "position": torch.arange(batch)}


def objective_of(teacher, **options):
    objective = Distillation(teacher="teacher", vocab_size=50, max_seq_len=12, **options)
    objective.compare({"teacher": teacher.eval().requires_grad_(False)})
    return objective


def loss_and_gradients(objective, model, parts):
    model.zero_grad()
    loss = sum(objective.loss(model, part).loss for part in parts)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_distillation_loss_weighs_cross_entropy_and_divergence(options):
    model, teacher, part = make_model(), make_model(1), microbatch()
    ours = objective_of(teacher, **options).loss(model, part)
    student, taught = (each(part["tokens"], return_logits=True).logits for each in (model, teacher))
    valid, temperature = part["targets"] != -100, options.get("temperature", 1.0)
    chosen = student.log_softmax(-1).gather(-1, part["targets"].clamp(min=0)[..., None]).squeeze(-1)
    distance, ratio = divergence(student, taught, **options)[valid].sum(), options.get("ce_ratio", 0.5)
    torch.testing.assert_close(ours.metrics["divergence"].sum, distance)
    torch.testing.assert_close(ours.metrics["cross_entropy"].sum, -chosen[valid].sum())
    torch.testing.assert_close(ours.loss, -ratio * chosen[valid].sum() + (1 - ratio) * temperature**2 * distance)


@pytest.mark.parametrize("options", OPTIONS[:-1], ids=str)
def test_student_equal_to_its_teacher_has_zero_loss_and_gradients(options):
    model, part = make_model(), microbatch()
    objective = objective_of(make_model(), **{**options, "ce_ratio": 0.0})
    loss, gradients = loss_and_gradients(objective, model, [part])
    assert loss.item() == pytest.approx(0, abs=1e-5)
    assert max(gradient.abs().max().item() for gradient in gradients) < 1e-5


@pytest.mark.parametrize("tiles", [0, 7])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@settings(max_examples=5, deadline=None)
@given(cut=st.integers(1, 4), seed=st.integers(0, 20))
def test_distillation_gradients_do_not_depend_on_microbatches_and_tiles(options, tiles, cut, seed):
    model, whole = make_model(logprob_tile_tokens=tiles), microbatch(seed=seed)
    objective = objective_of(make_model(1), **options)
    parts = [{name: value[rows] for name, value in whole.items()} for rows in (slice(cut), slice(cut, None))]
    ours = loss_and_gradients(objective, model, parts)
    untiled = make_model()
    theirs = loss_and_gradients(objective, untiled, [whole])
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-6)
    largest = max(1.0, max(gradient.abs().max().item() for gradient in theirs[1]))
    for a, b in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6 * largest)
    assert sum(map(objective.num_valid, parts)) == objective.num_valid(whole)


def test_padding_is_ignored_by_the_distillation_loss():
    model, part = make_model(), microbatch()
    objective = objective_of(make_model(1), top_k=4)
    padded = {name: torch.cat([value, value[:1]]) for name, value in part.items()}
    padded["position"][-1] = -1
    torch.testing.assert_close(objective.loss(model, padded).loss, objective.loss(model, part).loss)
    nothing = {**part, "position": torch.full((5,), -1)}
    loss, gradients = loss_and_gradients(objective, model, [nothing])
    assert loss == 0
    assert not any(gradient.any() for gradient in gradients)


def test_teacher_with_another_vocabulary_is_refused():
    with pytest.raises(ConfigError, match=r"objective\.teacher: .* 60 tokens and the student 50"):
        objective_of(make_model(vocab_size=60)).loss(make_model(), microbatch())


class Own(nn.Module):
    def forward(self, tokens, targets=None, *, return_logits=False, read=None):
        """Lacks `per_token`, like a user's model from before that keyword existed."""


def test_model_without_a_required_keyword_is_refused_by_name():
    objective = Distillation(teacher="teacher", vocab_size=50, max_seq_len=12)
    with pytest.raises(ConfigError, match=r"model: is Own, .* objective Distillation calls it with per_token; add and"):
        check_forward(objective, Own())
    check_forward(objective, make_model())
    check_forward(SFT(), Own())
