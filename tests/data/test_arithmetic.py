"""Arithmetic data: correct answers, and validation sums that no form or seed has in its training split."""

import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.composition import configure

from foundry.config.schemas.data import ArithmeticForm
from foundry.core.errors import ConfigError
from foundry.data.arithmetic import Sum, arithmetic

QUESTION = re.compile(r"(\d+)\+(\d+)[?:]")


def make(tmp_path, **changes):
    options = {"seed": 1, "form": ArithmeticForm.chats, "num_rows": 300, "seq_len": 160, "vocab_size": 257}
    options |= {"tokenizer": None, "held_out": 0.05, "cache_dir": str(tmp_path)}
    return arithmetic(**options | changes)


def sums(splits, split):
    """Return the sums of a split, each with the smaller number first."""
    dataset = getattr(splits, split)
    tokens = getattr(dataset, "examples", dataset).tokens.tolist()
    text = splits.tokenizer.decode(tokens, skip_special_tokens=False)
    return [tuple(sorted((int(a), int(b)))) for a, b in QUESTION.findall(text)]


@given(st.integers(2, 3).flatmap(lambda n: st.tuples(*[st.integers(10 ** (n - 1), 10**n - 1)] * 2)))
def test_worked_sum_derives_each_digit_from_the_previous_carry(numbers):
    worked = Sum(*numbers).solution()
    steps, answer = worked.split(". Answer: ")
    assert int(answer) == sum(numbers)
    totals = [0]
    for place, step in enumerate(steps.split(", ")):
        terms, total = step.split("=")
        digits = [int(str(number)[-1 - place]) for number in numbers]
        assert terms == f"{digits[0]}+{digits[1]}" + "+1" * (totals[-1] >= 10)
        assert int(total) == sum(map(int, terms.split("+")))
        totals.append(int(total))
    assert answer == "".join(str(total)[-1] for total in totals[:0:-1]) if totals[-1] < 10 else answer.startswith("1")
    assert all(0 <= total <= 19 for pair in pairwise(totals) for total in pair)


def test_chat_form_prompts_end_at_the_question_of_one_or_two_turns(tmp_path):
    splits = make(tmp_path)
    prompt = splits.prompts[0]
    question = splits.tokenizer.decode(list(prompt.tokens))
    a, b = map(int, QUESTION.findall(question)[-1])
    assert question.endswith(f"user: What is {a}+{b}?\nassistant: ")
    assert prompt.answer == Sum(a, b).solution()
    assert Sum(47, 38).solution() == "7+8=15, 4+3+1=8. Answer: 85"
    assert (len(splits.train), len(splits.validation)) == (300, 512)
    two_turns = sum(len(QUESTION.findall(splits.tokenizer.decode(list(p.tokens)))) == 2 for p in splits.prompts)
    assert 0.08 < two_turns / 512 < 0.22


def test_train_and_validation_sums_are_disjoint_over_forms_and_seeds(tmp_path):
    forms = {form: make(tmp_path, form=form) for form in ArithmeticForm if form is not ArithmeticForm.prompts}
    other = make(tmp_path, seed=2)
    held_out = {found for splits in (*forms.values(), other) for found in sums(splits, "validation")}
    learnt = {found for splits in (*forms.values(), other) for found in sums(splits, "train")}
    assert len(held_out) > 300
    assert not held_out & learnt
    assert {len(str(a)) for a, _ in learnt} == {2, 3}
    assert sums(other, "validation") == sums(forms[ArithmeticForm.chats], "validation")
    assert sums(other, "train") != sums(forms[ArithmeticForm.chats], "train")


def test_same_seed_reproduces_identity_and_tokens(tmp_path):
    one, again = make(tmp_path / "a"), make(tmp_path / "b")
    assert one.identity() == again.identity()
    assert one.train.tokens.tolist() == again.train.tokens.tolist()
    assert make(tmp_path / "a", seed=2).fingerprint != one.fingerprint


def test_digits_are_not_merged_and_forms_share_a_tokenizer(tmp_path):
    text, chats = make(tmp_path, form=ArithmeticForm.text), make(tmp_path)
    assert text.tokenizer.get_vocab_size() == 257
    assert text.tokenizer.to_str() == chats.tokenizer.to_str()
    assert len(text.tokenizer.encode("100+200").ids) == 7


def test_objective_that_does_not_match_the_form_is_refused():
    with pytest.raises(ConfigError, match=r"objective: is SFT, which needs completions, but data is Arithmetic"):
        configure("data=arithmetic", "data.form=text", "objective=sft")
    with pytest.raises(
        ConfigError, match=r"objective: is NextToken, which needs sequences and tokens, but data is Arithm"
    ):
        configure("data=arithmetic", "data.form=preferences")
    with pytest.raises(ConfigError, match=r"data\.train_on: is last but has no effect without data\.form=chats"):
        configure("data=arithmetic", "data.form=preferences", "objective=dpo", "data.train_on=last")
    assert configure("data=arithmetic", "data.form=text").data.form is ArithmeticForm.text
    assert configure("data=arithmetic", "objective=sft").data.vocab_size == 257


def test_conversation_longer_than_seq_len_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.seq_len: row:\d+ has \d+ tokens, more than .*=64"):
        make(tmp_path, seq_len=64)
