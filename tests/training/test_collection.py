import gc
import weakref

import pytest

from foundry.training.collection import CollectedBetweenSteps


class Node:
    """An object in a reference cycle with itself."""

    def __init__(self):
        self.own = self


def test_garbage_is_collected_at_every_fiftieth_step_only():
    with CollectedBetweenSteps() as garbage:
        assert not gc.isenabled()
        alive = weakref.ref(Node())
        for step in range(1, 50):
            garbage.after_step(step)
        assert alive() is not None
        garbage.after_step(50)
        assert alive() is None
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_garbage_collection_is_reenabled_after_an_exception():
    with pytest.raises(ValueError, match="wrong"), CollectedBetweenSteps():
        raise ValueError("wrong")
    assert gc.isenabled()
