"""Literal orders. If one of these changes, every saved state and every published run loses its order.

A wanted change raises ``loader.lanes.ORDER_VERSION`` and replaces the literals below, never only the literals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from loader.epochs import Orders
from loader.lanes import ORDER_VERSION
from loader.permute import Int64s

FEW = np.array([3, 1, 0, 4, 2], dtype=np.int64)
MANY = np.arange(1, 17, dtype=np.int64) % 5 + 1

CUT_EPOCH_0 = [2, 302, 1, 301, 0, 303, 100, 401, 300, 400]
CUT_EPOCH_1 = [1, 303, 2, 302, 0, 301, 100, 401, 300, 400]
CUT_SEED_1 = [100, 401, 400, 300, 0, 301, 2, 302, 1, 303]
DEALT = [
    *(501, 400, 202, 900, 500, 701, 201, 602, 801, 702, 203, 102, 802, 0, 200, 600, 800, 700, 1302, 100, 1000, 703),
    *(1304, 101, 803, 1, 1301, 601, 1001, 1202, 1100, 303, 804, 1203, 1102, 300, 1500, 1200, 1303, 304, 1501, 1400),
    *(1101, 301, 1201, 1300, 302),
]
EXCHANGED = [
    *(400, 601, 102, 900, 1, 602, 101, 804, 1200, 600, 100, 803, 0, 1300, 301, 500, 1203, 1304, 303, 801, 1201, 1100),
    *(300, 802, 1202, 1102, 700, 501, 200, 1303, 702, 800, 201, 1101, 302, 1501, 203, 1302, 701, 1000, 202, 1301, 703),
    *(1500, 1400, 304, 1001),
]
IN_ORDER = [0, 1, 2, 100, 300, 301, 302, 303, 400, 401]


@pytest.mark.parametrize(
    ("counts", "epoch", "more", "expected"),
    [
        (FEW, 0, {"batch": 2, "seed": 0}, CUT_EPOCH_0),
        (FEW, 1, {"batch": 2, "seed": 0}, CUT_EPOCH_1),
        (FEW, 0, {"batch": 2, "seed": 1}, CUT_SEED_1),
        (FEW, 5, {"batch": 2, "seed": 1, "shuffle": False}, IN_ORDER),
        (MANY, 3, {"batch": 4, "seed": 42, "block_shards": 2}, DEALT),
        (MANY, 3, {"batch": 4, "seed": 42, "block_shards": 2, "exchange": True}, EXCHANGED),
    ],
)
def test_orders_never_change(counts: Int64s, epoch: int, more: dict[str, Any], expected: list[int]) -> None:
    order = Orders.begin(counts, counts * 10, **{"shuffle": True, **more})(epoch)
    shard, index = order.locate(np.arange(order.total))
    assert (shard * 100 + index).tolist() == expected


def test_large_orders_never_change() -> None:
    counts = np.full(40, 50_000)
    order = Orders.begin(counts, counts, batch=256, nodes=4, lanes=8, seed=9, shuffle=True)(1)
    shard, index = order.locate(np.array([0, 1, 2, 123_456, 777_777, 1_999_999]))
    assert shard.tolist() == [11, 17, 5, 11, 28, 33]
    assert index.tolist() == [30232, 25243, 29272, 19080, 45765, 5552]


def test_the_literals_are_of_this_version() -> None:
    assert ORDER_VERSION == 1
