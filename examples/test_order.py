"""The example of the README: one property, eight ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.smp(ranks=8)
@given(objects=st.lists(st.integers(), min_size=8, max_size=8))
def test_order(smp, objects):
    assert smp.allgather(objects[smp.rank()], smp.WORLD) == objects
