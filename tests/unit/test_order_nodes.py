"""The table of lanes and nodes: in proportion, and repaired rather than redrawn."""

from __future__ import annotations

import pytest

from cachefs.errors import ConfigError
from loader.nodes import (
    assign_lanes,
    grouped,
    launched_nodes,
    nodes_of_lanes,
    ranks_of_nodes,
    runs_of_ranks,
    told_apart,
)


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


@pytest.mark.parametrize("lanes", [32, 64, 72, 100])
def test_a_node_joins_eight_or_leaves_them_by_the_fewest_moves(lanes: int) -> None:
    """All nodes have eight ranks. No table of the new proportion is nearer: each node gives up only what is beyond its
    new share, rounded up for as many as may have one lane more."""
    eight, nine = ({f"n{i}": 8 for i in range(count)} for count in (8, 9))
    seven = {name: 8 for name in eight if name != "n3"}
    table = assign_lanes(lanes, eight)
    for after in (nine, seven, {**seven, "new": 8}):
        repaired = assign_lanes(lanes, after, table)
        share, more = divmod(lanes, len(after))
        held = sorted((table.count(name) for name in after), reverse=True)
        kept = sum(min(count, share + (i < more)) for i, count in enumerate(held))
        assert moved(table, repaired) == lanes - kept
        assert sorted(repaired.count(name) for name in after) == sorted(share + (i < more) for i in range(len(after)))
        assert assign_lanes(lanes, dict(reversed(after.items())), repaired) == repaired


LAUNCHED: list[tuple[dict[str, str], int]] = [
    ({}, 1),
    ({"WORLD_SIZE": "8"}, 1),
    ({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"}, 1),
    ({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2"}, 2),
    ({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "8"}, 8),
    ({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "3"}, 1),  # not as many ranks on each
    ({"WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2"}, 1),  # of the 16, 8 read different data
    ({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "x"}, 1),
    ({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "0"}, 1),
    ({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "-2"}, 1),
    ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "4"}, 4),
    ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "4", "SLURM_DISTRIBUTION": "block:cyclic"}, 4),
    ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "4", "SLURM_DISTRIBUTION": "cyclic"}, 1),
    ({"SLURM_STEP_NUM_TASKS": "8"}, 1),
    ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, 1),
    # torchrun in Slurm: a task starts the ranks of its node
    ({"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}, 2),
]


@pytest.mark.parametrize(("launcher", "nodes"), LAUNCHED)
def test_nodes_are_counted_by_what_the_launcher_tells_all_ranks(launcher: dict[str, str], nodes: int) -> None:
    assert launched_nodes(launcher, 8) == nodes


def test_ranks_are_grouped_evenly() -> None:
    assert grouped(6, ["a", "b"]) == ("a",) * 3 + ("b",) * 3
    assert grouped(3, ["a"]) == ("a",) * 3
    assert runs_of_ranks(grouped(6, ["b", "a", "c"])).tolist() == list(range(6))


def test_nodes_of_one_name_are_told_apart() -> None:
    assert told_apart(["a", "b"]) == ("a", "b")
    assert told_apart(["a", "b", "a", "a"]) == ("a", "b", "a#2", "a#3")
    assert told_apart(["a", "a#2", "a"]) == ("node-0", "node-1", "node-2")
