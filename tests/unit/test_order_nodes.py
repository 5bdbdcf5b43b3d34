"""The table of lanes and nodes: in proportion, and repaired rather than redrawn."""

from __future__ import annotations

import pytest

from cachefs.errors import ConfigError
from loader.nodes import assign_lanes, nodes_of_lanes, ranks_of_nodes, runs_of_ranks


def moved(before: tuple[str, ...], after: tuple[str, ...]) -> int:
    return sum(a != b for a, b in zip(before, after, strict=True))


def test_a_new_table_gives_nodes_neighbouring_lanes() -> None:
    assert assign_lanes(8, {"a": 4, "b": 4}) == ("a",) * 4 + ("b",) * 4
    assert assign_lanes(8, {"a": 6, "b": 2}) == ("a",) * 6 + ("b",) * 2
    assert assign_lanes(3, {"a": 1, "b": 1}) == ("a", "a", "b")
    assert assign_lanes(2, {"a": 1, "b": 1, "c": 1}) == ("a", "b")
    assert assign_lanes(4, {"a": 1, "idle": 0}) == ("a",) * 4


def test_renumbered_ranks_move_nothing() -> None:
    table = assign_lanes(12, {"a": 2, "b": 2, "c": 2})
    assert assign_lanes(12, {"c": 2, "a": 2, "b": 2}, table) == table
    assert assign_lanes(12, {"a": 4, "b": 4, "c": 4}, table) == table


def test_a_node_more_takes_its_share_and_no_more() -> None:
    table = assign_lanes(12, {"a": 2, "b": 2, "c": 2})
    wider = assign_lanes(12, {"a": 2, "b": 2, "c": 2, "d": 2}, table)
    assert [wider.count(name) for name in "abcd"] == [3, 3, 3, 3]
    assert moved(table, wider) == 3
    assert moved(wider, assign_lanes(12, {"a": 2, "b": 2, "c": 2}, wider)) == 3


def test_the_odd_lane_stays_where_it_is() -> None:
    table = ("a", "b", "b")
    assert assign_lanes(3, {"a": 1, "b": 1}, table) == table


@pytest.mark.parametrize(
    ("lanes", "nodes", "previous"),
    [(0, {"a": 1}, None), (4, {}, None), (4, {"a": 0}, None), (4, {"a": 2, "b": -1}, None), (4, {"a": 1}, ("a",))],
)
def test_what_cannot_be_assigned_is_refused(
    lanes: int, nodes: dict[str, int], previous: tuple[str, ...] | None
) -> None:
    with pytest.raises(ConfigError):
        assign_lanes(lanes, nodes, previous)


def test_ranks_take_runs_in_their_nodes_order() -> None:
    spread = ["a", "b", "a", "b", "c", "b"]
    assert ranks_of_nodes(spread) == {"a": 2, "b": 3, "c": 1}
    assert runs_of_ranks(spread).tolist() == [0, 2, 1, 3, 5, 4]
    assert runs_of_ranks(["a", "a", "b"]).tolist() == [0, 1, 2]
    assert nodes_of_lanes(("b", "a", "b"), {"a": 1, "b": 2}).tolist() == [1, 0, 1]
