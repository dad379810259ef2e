import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from foundry.data.corpora.tokenizer import END_OF_DOCUMENT, train_tokenizer
from foundry.data.splits import DataSplits
from foundry.generation.text_samples import TextSamples
from foundry.models.transformer import Transformer
from foundry.objectives.next_token import NextToken
from foundry.objectives.sft import SFT


def make_model(vocab_size=50, **changes):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_layers": 1,
        "num_heads": 2,
        "num_kv_heads": 2,
        "max_seq_len": 12,
    }
    return Transformer(vocab_size=vocab_size, **sizes, init_std=0.3, **changes)


def microbatch(batch=3, seq=12, *, seed=0, ignored=0.3):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (batch, seq + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[torch.rand(targets.shape, generator=generator) < ignored] = -100
    return {"tokens": tokens[:, :-1], "targets": targets, "position": torch.arange(batch)}


def test_next_token_loss_is_the_sum_of_cross_entropies():
    model, part = make_model(), microbatch()
    expected = F.cross_entropy(model(part["tokens"]).logits.flatten(0, 1), part["targets"].flatten(), reduction="sum")
    result = NextToken().loss(model, part)
    torch.testing.assert_close(result.loss, expected)
    assert result.metrics == {}


def test_z_loss_is_over_valid_tokens_only():
    model, part = make_model(), microbatch()
    logits = model(part["tokens"]).logits
    valid = part["targets"] != -100
    cross_entropy = F.cross_entropy(logits.flatten(0, 1), part["targets"].flatten(), reduction="sum")
    z_loss = 0.1 * logits.logsumexp(-1)[valid].square().sum()
    result = NextToken(z_loss_coefficient=0.1).loss(model, part)
    torch.testing.assert_close(result.loss, cross_entropy + z_loss)
    torch.testing.assert_close(result.metrics["z_loss"].sum, z_loss)
    torch.testing.assert_close(result.metrics["cross_entropy"].sum, cross_entropy)


def test_num_valid_excludes_ignored_targets_and_padding_samples():
    part = microbatch(ignored=0.0)
    part["targets"][0, :5] = -100
    part["position"][2] = -1
    count = NextToken().num_valid(part)
    assert count == 12 - 5 + 12
    assert type(count) is int


@settings(max_examples=20, deadline=None)
@given(batch=st.integers(1, 6), cut=st.integers(0, 6), seed=st.integers(0, 50), z=st.sampled_from([0.0, 0.01]))
def test_next_token_losses_and_counts_add_up_over_microbatches(batch, cut, seed, z):
    model, objective, whole = make_model(), NextToken(z_loss_coefficient=z), microbatch(batch, seed=seed)
    parts = [{k: v[:cut] for k, v in whole.items()}, {k: v[cut:] for k, v in whole.items()}]
    parts = [part for part in parts if len(part["tokens"])]
    torch.testing.assert_close(
        sum(objective.loss(model, part).loss for part in parts), objective.loss(model, whole).loss, rtol=1e-4, atol=1e-4
    )
    assert sum(map(objective.num_valid, parts)) == objective.num_valid(whole)


@pytest.mark.parametrize("z", [0.0, 0.1])
def test_padding_is_ignored_by_the_next_token_loss(z):
    model, objective, part = make_model(), NextToken(z_loss_coefficient=z), microbatch()
    padded = {name: torch.cat([value, value[:1]]) for name, value in part.items()}
    padded["position"][-1] = -1
    torch.testing.assert_close(objective.loss(model, padded).loss, objective.loss(model, part).loss)
    assert objective.num_valid(padded) == objective.num_valid(part)


@pytest.mark.parametrize("z", [0.0, 0.1])
@pytest.mark.parametrize("tile", [0, 5])
def test_fully_masked_microbatch_has_exactly_zero_gradient(z, tile):
    model, part = make_model(logprob_tile_tokens=tile), microbatch()
    part["position"][:] = -1
    result = NextToken(z_loss_coefficient=z).loss(model, part)
    assert NextToken().num_valid(part) == 0
    assert result.loss.item() == 0.0
    result.loss.backward()
    assert all(p.grad is not None and p.grad.abs().max() == 0 for p in model.parameters())


@pytest.fixture(scope="module")
def data():
    tokenizer = train_tokenizer(["def add(a, b):\n    return a + b\n"] * 20, 300)
    return DataSplits(train=[], validation=[], fingerprint="", tokens_per_sample=12, tokenizer=tokenizer)


def test_next_token_generation_is_deterministic_and_saved_to_a_file(data, tmp_path):
    model = make_model(vocab_size=300)
    objective = NextToken(sample_tokens=20)
    model.train()
    first = objective.generate(model, data, "cpu", prompt="def ")
    torch.manual_seed(7)
    again = objective.generate(model, data, "cpu", prompt="def ")
    assert model.training
    assert first == again
    assert first.text.startswith("def ")
    assert len(first.text) > len("def ")
    assert objective.generate(model, data, "cpu", prompt="def ", seed=1) != first
    file = first.save(tmp_path / "samples")
    assert file == tmp_path / "samples.txt"
    head, rest = file.read_text(encoding="utf-8").split("\n\n=== sample 1 of 1 ", 1)
    assert head == "temperature 0.8, seed 0"
    prompt, continuation = rest.split("\n--- continuation ", 1)
    assert prompt.partition("\n--- prompt ")[2].partition("\n")[2] == "def "
    assert "def " + continuation.partition("\n")[2] == first.text + "\n"


def test_sample_file_names_step_seed_and_prompt_of_each_sample(tmp_path):
    sampling = {"temperature": 0.5, "seed": 3, "top_k": 7}
    samples = TextSamples(("a b\n\nc", "d e"), prompts=("a ", "d"), sampling=sampling, step=20)
    assert samples.text == "a b\n\nc\n\nd e"  # Printed to the terminal.
    lines = samples.save(tmp_path / "samples").read_text().splitlines()
    assert lines[:2] == ["step 20, temperature 0.5, seed 3, top_k 7", ""]
    assert [line.strip("=- ") if line.startswith(("===", "---")) else line for line in lines[2:]] == [
        "sample 1 of 2", "prompt", "a ", "continuation", "b", "", "c", "",
        "sample 2 of 2", "prompt", "d", "continuation", " e",
    ]  # fmt: skip


def test_temperature_zero_generates_the_argmax_token(data):
    model = make_model(vocab_size=300)
    tokens = data.tokenizer.encode("def add").ids
    for _ in range(6):
        tokens.append(int(model(torch.tensor([tokens[-12:]])).logits[0, -1].argmax()))
    end = data.tokenizer.token_to_id(END_OF_DOCUMENT)
    assert end not in tokens
    samples = NextToken().generate(model, data, "cpu", prompt="def add", max_new_tokens=6, temperature=0.0)
    assert samples.text == data.tokenizer.decode(tokens)


def test_generation_defaults_come_from_the_objective(data):
    model = make_model(vocab_size=300)
    for kind in (NextToken, SFT):
        objective = kind(sample_tokens=5, temperature=0.25)
        own = objective.generate(model, data, "cpu", prompt="def add", seed=3)
        assert own == kind().generate(model, data, "cpu", prompt="def add", seed=3, max_new_tokens=5, temperature=0.25)
        assert own != objective.generate(model, data, "cpu", prompt="def add", seed=3, temperature=2.0)
        assert own.sampling["temperature"] == 0.25


def test_generation_stops_at_the_end_of_document(data):
    model = make_model(vocab_size=300)
    end = data.tokenizer.token_to_id(END_OF_DOCUMENT)
    calls = []

    class Ending(torch.nn.Module):
        def forward(self, tokens, *, return_logits):
            calls.append(tokens.shape)
            output = model(tokens, return_logits=return_logits)
            if len(calls) == 3:
                output.logits[..., end] = 1e4
            return output

    samples = NextToken().generate(Ending(), data, "cpu", prompt="def", max_new_tokens=9, temperature=0.0)
    assert len(calls) == 3
    assert END_OF_DOCUMENT not in samples.text
    assert (
        samples.text == NextToken().generate(model, data, "cpu", prompt="def", max_new_tokens=2, temperature=0.0).text
    )


def test_empty_prompt_starts_a_document(data):
    assert NextToken().generate(make_model(vocab_size=300), data, "cpu", prompt="", max_new_tokens=3).text
