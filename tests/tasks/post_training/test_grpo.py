"""The GRPO loss of a step matches an implementation in plain torch."""

import pytest
import torch
from support.rollout_parts import make_model, make_objective, make_source

from foundry.tasks.post_training.schemas.policy import ImportanceWeights, KLGradient, KLType

FILTERS = {"generation_temperature": 0.8, "generation_top_k": 40, "generation_top_p": 0.95}
NO_FILTERS = {"generation_temperature": 1.0, "generation_top_k": None, "generation_top_p": 1.0}
CORRECTED = {
    "use_importance_sampling_correction": True,
    "importance_weights": ImportanceWeights.tis,
    "importance_weight_min": 0.8,
    "importance_weight_max": 1.2,
}


def log_probs(model, tokens, targets, *, temperature=1.0, top_k=None, top_p=1.0):
    """Return log-probabilities, (completions, seq), from a softmax over filtered full logits."""
    logits = model(tokens, return_logits=True).logits / temperature
    probabilities = logits.softmax(-1)
    ordered = probabilities.sort(dim=-1, descending=True).values
    if top_k is not None:
        least = ordered[..., top_k - 1 : top_k]
        logits = logits.masked_fill(probabilities < least, -torch.inf)
        probabilities = logits.softmax(-1)
        ordered = probabilities.sort(dim=-1, descending=True).values
    if top_p < 1:
        before = ordered.cumsum(-1) - ordered
        least = ordered.masked_fill(before >= top_p, 2.0).amin(-1, keepdim=True)
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    return logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None]).squeeze(-1)


def written_out(model, reference, samples, rewards, old, *, filters, beta, by_token, on_policy):
    """Return the loss from the papers' formulas: leave-one-out advantages, clipped ratio and k3 estimate."""
    tokens, targets = samples["tokens"], samples["targets"]
    mask = targets != -100
    x = log_probs(model, tokens, targets, **filters).where(mask, 0.0)
    plain = log_probs(model, tokens, targets).where(mask, 0.0)
    f = log_probs(reference, tokens, targets).where(mask, 0.0)
    o = x.detach() if old is None else old.where(mask, 0.0)
    advantage = torch.empty(len(rewards), dtype=torch.float64)
    for start in range(0, len(rewards), 4):
        for row in range(start, start + 4):
            others = torch.stack([rewards[other] for other in range(start, start + 4) if other != row])
            std = others.std()
            advantage[row] = (rewards[row] - others.mean()) / (std + 1e-6 if std > 1e-7 else 1.0)
    ratio, a = (x - o).exp(), advantage.float()[:, None]
    policy = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    r = f - plain
    kl = (r.exp() - 1 - r) * (plain - (o if on_policy else plain.detach())).exp()  # The sampler's values equal `old`.
    loss = ((policy + beta * kl) * mask).double()
    return loss.sum() / mask.sum() if by_token else (loss.sum(-1) / mask.sum(-1)).mean()


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize(
    ("filters", "updates", "on_policy"), [(FILTERS, 1, True), (NO_FILTERS, 2, True), (FILTERS, 2, False)]
)
def test_grpo_loss_and_gradient_match_a_plain_implementation(by_token, filters, updates, on_policy):
    model, reference = make_model(), make_model(seed=4)
    clamps = {"kl_input_clamp": None, "kl_output_clamp": None}
    settings = {"updates_per_rollout": updates, "token_level_loss": by_token, "ref_policy_kl_penalty": 0.3}
    settings["use_on_policy_kl_approximation"] = on_policy
    objective = make_objective(reference, **settings, **clamps, **filters)
    source = make_source(objective, model)
    plain = {name.removeprefix("generation_"): value for name, value in filters.items()}
    for update in range(updates):
        window = source.next_window()
        if update == 1:  # Change the model between the two updates.
            with torch.no_grad():
                first = make_model()
                for parameter in model.parameters():
                    parameter.add_(0.002 * torch.randn_like(parameter))
        count = sum(objective.num_valid(microbatch) for microbatch in window.microbatches)
        parts = [objective.loss(model, microbatch) for microbatch in window.microbatches]
        loss = torch.stack([part.loss for part in parts]).sum() / count
        whole = {name: source._samples[name] for name in ("tokens", "targets")}
        size = len(whole["tokens"]) // updates
        rows = slice(update * size, (update + 1) * size)
        samples = {name: column[rows] for name, column in whole.items()}
        rewards = source._samples["reward"][rows]
        old = log_probs(first, samples["tokens"], samples["targets"], **plain).detach() if update else None
        options = {"filters": plain, "beta": 0.3, "by_token": by_token, "on_policy": on_policy}
        expected = written_out(model, reference, samples, rewards, old, **options)
        assert loss.item() == pytest.approx(expected.item(), abs=1e-6, rel=1e-5)
        names = [name for name, _ in model.named_parameters()]
        ours = torch.autograd.grad(loss, list(model.parameters()))
        theirs = torch.autograd.grad(expected, list(model.parameters()))
        for name, one, other in zip(names, ours, theirs, strict=True):
            assert torch.allclose(one, other, rtol=1e-3, atol=2e-6), name


SETTINGS = [
    ({}, {"normalize_rewards": False}),
    ({}, {"use_rloo": False}),
    ({}, {"positive_example_nll_weight": 0.5}),
    ({}, {"ratio_clip_min": 0.01}),
    ({}, {"ratio_clip_max": 0.01}),
    ({}, {"ratio_clip_c": 1.01}),
    ({}, {"token_level_loss": False}),
    ({"token_level_loss": False}, {"sequence_level_importance_ratios": True}),
    ({}, {"disable_ppo_ratio": True}),
    ({}, {"force_on_policy_ratio": True}),
    ({}, {"use_cispo": True}),
    ({}, {"ref_policy_kl_penalty": 0.5}),
    ({}, {"kl_type": KLType.k1}),
    ({}, {"kl_input_clamp": 0.01}),
    ({}, {"kl_output_clamp": 0.001}),
    ({}, {"kl_gradient": KLGradient.ratio}),
    ({}, {"use_kl_in_reward": True}),
    ({}, {"use_on_policy_kl_approximation": True}),
    ({}, {"use_importance_sampling_correction": True}),
    (CORRECTED, {"importance_weights": ImportanceWeights.icepop}),
    (CORRECTED, {"importance_weight_min": 0.99}),
    (CORRECTED, {"importance_weight_max": 1.01}),
]


def gradient(settings):
    """Return the gradient of the output matrix if the policy, the policy at the rollout and the sampler all differ."""
    objective = make_objective(make_model(seed=4), updates_per_rollout=2, **NO_FILTERS, **settings)
    model = make_model()
    (part,) = make_source(objective, model, per_gpu_batch_size=8).next_window().microbatches
    generator = torch.Generator().manual_seed(0)
    for name in ("old", "sampler"):
        part[name] = part[name] + 0.3 * torch.randn(part[name].shape, generator=generator)
    (found,) = torch.autograd.grad(objective.loss(model, part).loss, [model.lm_head.weight])
    return found


@pytest.mark.parametrize(("base", "changed"), SETTINGS, ids=lambda settings: ",".join(settings))
def test_each_grpo_setting_changes_the_gradient(base, changed):
    assert not torch.allclose(gradient({**base, **changed}), gradient(base), rtol=1e-3)
