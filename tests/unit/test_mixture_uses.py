"""When a mixture's shards are read, by what a plan says: also those of sources that are hardly ever read."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loader.mixtureahead import uses_of
from tests.unit.test_mixture_ahead import order_of


@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=2, max_size=4),
    st.lists(st.integers(1, 9) | st.just(100_000), min_size=4, max_size=4),
    st.integers(0, 20),
)
@example([[4], [4]], [100_000, 1, 1, 1], 0)
@settings(max_examples=40, deadline=None)
def test_every_sample_lies_where_its_shard_is_said_to_be_read(
    counts: list[list[int]], shares: list[int], begin: int
) -> None:
    order = order_of(counts, tuple(shares[: len(counts)]), 20)
    places = order.places(np.arange(begin, 40, dtype=np.int64))
    assert places.origin is not None
    uses = [uses_of(order, source, begin, 40) for source in range(len(counts))]
    for at, source, shard in zip(range(begin, 40), places.origin.source, places.shard, strict=True):
        of = uses[source]
        assert ((of.shard == shard) & (of.first <= at) & (at <= of.last)).any()
    for source, of in enumerate(uses):
        assert len(of.shard) == len(of.first) == len(of.last)
        if order.taken(begin)[source] == order.taken(40)[source]:
            assert not len(of.shard)


@pytest.mark.parametrize("begin", [0, 20])
def test_a_source_that_is_not_read_soon_needs_nothing(begin: int) -> None:
    order = order_of([[4, 4], [3]], (1_000_000, 1), 20)
    assert [len(column) for column in uses_of(order, 1, begin, 40)] == [0, 0, 0]
