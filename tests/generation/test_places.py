"""Prompts enter the places of a batch in order, several at a time, and equal prompts together."""

from hypothesis import given
from hypothesis import strategies as st

from foundry.generation.places import Places


def taken_over_time(prompts, count, lengths, *, joins):
    """Return the prompts that enter at each step, and the places that are taken after it; prompt i leaves in time."""
    places, left, entries, taken = Places(prompts, count, joins=joins), {}, [], []
    while True:
        entering = places.enter(len(left))
        left |= {index: lengths[index] for index in entering}
        if not left:
            return entries, taken
        entries.append(list(entering))
        taken.append(len(left))
        left = {index: steps - 1 for index, steps in left.items() if steps > 1}


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=30),
    st.integers(1, 12),
    st.booleans(),
)
def test_every_prompt_enters_once_and_places_stay_filled(drawn, count, joins):
    prompts, lengths = [[prompt] for prompt, _ in drawn], [length for _, length in drawn]
    entries, taken = taken_over_time(prompts, count, lengths, joins=joins)
    order = [index for entering in entries for index in entering]
    assert order == list(range(len(prompts)))
    entered = 0
    for entering, number in zip(entries, taken, strict=True):
        entered += len(entering)
        assert number <= count
        if joins and entered < len(prompts):
            assert count - number < -(-count // 4), "a quarter of the places is free while prompts wait"
        if not joins and entering:
            assert number == len(entering), "prompts joined others"


def test_equal_prompts_enter_together_if_few_places_stay_free():
    def enter(group, count):
        return [
            len(entering)
            for entering in taken_over_time([[n // group] for n in range(24)], count, [1] * 24, joins=True)[0]
        ]

    assert enter(4, 16) == [16, 8]
    assert enter(6, 16) == [16, 8], "a quarter of the places would stay free"
    assert enter(5, 16) == [15, 9]
    assert enter(12, 16) == [16, 8]
