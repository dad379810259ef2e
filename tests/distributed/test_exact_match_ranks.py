"""Exact match of greedy answers, on one process and on two ranks."""

import pytest
from support.harness import run_ranks

from foundry.config.schemas.distributed import DDP, FSDP
from foundry.core.errors import ConfigError

QUESTIONS = ["the dog", "a", "the cat runs", "dog", "cat cat", "runs a dog", "the"]


def built():
    """Return a model and data; the reference answers are the model's, except those to the second and last question."""
    import torch

    from foundry.data.corpora.tokenizer import train_tokenizer
    from foundry.data.splits import DataSplits, Prompt
    from foundry.generation.decoding import Decoding, generate
    from foundry.models.transformer import Transformer

    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    model = Transformer(vocab_size=280, max_seq_len=32, init_std=0.3, **sizes)
    tokenizer = train_tokenizer(["the dog runs", "a cat"] * 9, 280)
    tokens = [tokenizer.encode(question).ids for question in QUESTIONS]
    decoding = Decoding(max_new_tokens=8, stop_ids=frozenset({0}))
    found = generate(model, tokens, decoding, context=32, device=torch.device("cpu"))
    answers = [f" {tokenizer.decode(continuation.answer)}\n" for continuation in found]
    answers[1] += "x"
    answers[-1] = "another"
    prompts = [Prompt(tuple(t), answer, row) for row, (t, answer) in enumerate(zip(tokens, answers, strict=True))]
    data = DataSplits(
        train=[],
        validation=[],
        fingerprint="",
        tokenizer=tokenizer,
        prompts=prompts,
        stop_ids=(0,),
        tokens_per_sample=9,
    )
    return model, data


def measure(model, data, world, **options):
    from support.contexts import evaluation_context

    from foundry.evaluators.exact_match import ExactMatch

    beats = []
    context = evaluation_context(world=world, heartbeat=beats.append)
    measured = ExactMatch(data=data, max_new_tokens=8, **options).evaluate(model, context)
    count = beats.count("answering prompts")
    assert beats.count("generating answers") == 8 * count  # One heartbeat per token.
    return measured, count


def alone():
    import torch

    from foundry.parallel.process_group import World

    return World.single(torch.device("cpu"))


def test_exact_match_ignores_surrounding_white_space():
    model, data = built()
    for size, beats in ((32, 1), (2, 4)):
        measured, count = measure(model, data, alone(), per_gpu_batch_size=size)
        assert (measured["exact_match"], count) == (5 / 7, beats)
    assert measure(model, data, alone(), max_samples=2)[0]["exact_match"] == 0.5


def test_exact_match_without_prompts_is_a_config_error():
    from foundry.data.splits import DataSplits
    from foundry.evaluators.exact_match import ExactMatch

    with pytest.raises(ConfigError, match=r"^evaluation\.evaluators\.exact_match: requires data with prompts"):
        ExactMatch(data=DataSplits(train=[], validation=[], fingerprint=""))


def measure_on_ranks(world):
    from foundry.config.schemas.precision import PrecisionMode
    from foundry.parallel.precision import PrecisionPolicy
    from foundry.parallel.process_group import arrange
    from foundry.parallel.wrap import parallelize

    found = []
    for config in (DDP(), FSDP()):
        model, data = built()
        own = arrange(world, config)
        policy = PrecisionPolicy(PrecisionMode.fp32)
        parallel = parallelize(model, policy, own, grad_checkpointing=False, torchcompile=False)
        found.append(measure(parallel.model.eval(), data, own, per_gpu_batch_size=2))
    return found


@pytest.mark.distributed
def test_exact_match_is_the_same_on_two_ranks():
    expected, _ = measure(*built(), alone())
    for results in run_ranks(measure_on_ranks, 2):
        assert results == [(expected, 2)] * 2
