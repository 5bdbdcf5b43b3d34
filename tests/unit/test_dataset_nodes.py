"""Data sets of ranks on several nodes: each reads its own lanes, whatever nodes and numbers the ranks had before."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from cachefs.errors import ConfigError, NearflashError, StateError
from loader import ShardDataset
from loader.epochs import OrderSettings
from loader.nodeplan import NodePlan
from loader.nodetables import NodeTables
from loader.settingwords import OrderWords
from loader.testing import write_mds, write_tars
from loader.workers import Place, find_worker
from tests.unit.test_loader_nodenames import FakeKeys

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
BATCH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """144 samples in 48 shards: whole shards in up to 12 lanes."""
    folder = tmp_path_factory.mktemp("mds")
    write_mds(folder, [3] * 48)
    return folder


def make(folder: Path, **options: Any) -> ShardDataset:
    return ShardDataset(folder, **{"global_batch_size": BATCH, "ids": True, "seed": 1, **options})


def ranks(folder: Path, world: int, nodes: Any, state: Any = None, **options: Any) -> list[ShardDataset]:
    made = [make(folder, rank=rank, world_size=world, nodes=nodes, **options) for rank in range(world)]
    for ds in made:
        if state is not None:
            ds.load_state_dict(json.loads(json.dumps(state)))
    return made


def ids(batches: Iterable[Any]) -> list[list[int]]:
    return [batch["__id__"].tolist() for batch in batches]


def joined(parts: Sequence[list[list[int]]]) -> list[list[int]]:
    """The global batches, each sorted: as sets they are the same whatever the nodes."""
    return [sorted(chain(*batch)) for batch in zip(*parts, strict=True)]


def read(datasets: list[ShardDataset], batches: int | None = None) -> list[list[list[int]]]:
    return [ids(islice(ds.batched(), batches)) for ds in datasets]


def shards(part: list[list[int]]) -> set[int]:
    return {number >> 32 for number in chain(*part)}


NAMES = ["a", "a", "b", "b", "c", "c"]


class TestOwnLanes:
    @pytest.mark.parametrize("nodes", [3, NAMES, ["a", "b", "c", "a", "b", "c"]])
    def test_a_node_opens_only_its_own_shards(self, folder: Path, nodes: Any) -> None:
        parts = read(ranks(folder, 6, nodes, lanes=12))
        assert joined(parts) == joined(read(ranks(folder, 6, 1, lanes=12))) and len(parts[0]) == 6
        of_rank = NAMES if nodes == 3 else nodes
        opened = {
            node: set().union(*(shards(part) for part, of in zip(parts, of_rank, strict=True) if of == node))
            for node in "abc"
        }
        assert [len(opened[node]) for node in "abc"] == [16] * 3
        assert len(set().union(*opened.values())) == 48
        # and the same ones in the next epoch
        again = read([_at(ds, 1) for ds in ranks(folder, 6, nodes, lanes=12)])
        for node in "abc":
            assert opened[node] == set().union(*(shards(p) for p, of in zip(again, of_rank, strict=True) if of == node))

    def test_lanes_follow_from_the_nodes_and_are_kept_by_a_state(self, folder: Path) -> None:
        states = {nodes: make(folder, rank=0, world_size=6, nodes=nodes).state_at(1) for nodes in (1, 2, 3)}
        assert {nodes: state["lanes"] for nodes, state in states.items()} == {1: 4, 2: 8, 3: 12}
        assert states[1]["nodes"] == []
        for state in states.values():
            for nodes in (1, 2, 3, 6):
                [ds] = ranks(folder, 6, nodes, state)[:1]
                assert ds.state_dict()["lanes"] == state["lanes"]

    def test_lanes_that_are_cut_are_read_by_their_nodes_too(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [100, 7, 37])
        datasets = ranks(tmp_path, 6, 3)
        assert datasets[0].state_dict()["cut"] and datasets[0].state_dict()["lanes"] == 12
        parts = read(datasets)
        assert joined(parts) == joined(read(ranks(tmp_path, 1, None, lanes=12)))
        plan = _plan(datasets[5])
        assert plan.split.lanes.tolist() == [8, 9, 10, 11]
        lane = plan.order.lane_of(plan.positions(2)).tolist()
        assert set(lane) <= {8, 9, 10, 11}

    @pytest.mark.parametrize("options", [{}, {"pad": True}])
    def test_sets_that_are_counted_while_they_are_read(self, tmp_path: Path, options: dict[str, Any]) -> None:
        """Also from a state on, whose repeats come from before it."""
        write_tars(tmp_path, [2, 3] * 40)
        options |= {"block_shards": 1, "lanes": 8}
        whole = joined([ids(make(tmp_path, **options).batched())])
        names = ["a", "b", "c", "a"]
        datasets = ranks(tmp_path, 4, names, **options)
        assert all(ds._definition.listing.progressive for ds in datasets)
        assert joined(read(datasets)) == whole
        for taken in (1, 5, len(whole) - 1):
            state = ranks(tmp_path, 4, names, **options)[0].state_at(taken)
            assert state["nodes"] == ["a", "b", "c"]
            for others in (names, ["c", "b", "d", "d"], ["x"] * 4):
                assert joined(read(ranks(tmp_path, 4, others, state, **options))) == whole[taken:]

    def test_in_the_data_set_s_own_order_no_lane_is_any_node_s(self, folder: Path) -> None:
        parts = read(ranks(folder, 6, 3, shuffle=False))
        assert [list(chain(*batch)) for batch in zip(*parts, strict=True)] == ids(make(folder, shuffle=False).batched())
        assert make(folder, rank=0, world_size=6, nodes=3, shuffle=False).state_at(1)["nodes"] == []

    @pytest.mark.parametrize("options", [{"drop_last": False}, {"pad": True}])
    def test_ranks_that_get_unequal_parts(self, folder: Path, options: dict[str, Any]) -> None:
        """A batch of 25 for three ranks that are not numbered node by node; the last one has 19."""
        options |= {"global_batch_size": 25, "lanes": 5}
        datasets = ranks(folder, 3, ["a", "b", "a"], **options)
        parts = read(datasets)
        assert [sorted(batch) for batch in ids(make(folder, **options).batched())] == joined(parts)
        for ds, part in zip(datasets, parts, strict=True):
            assert len(ds) == sum(map(len, part)) == len(list(ds))
        assert len({len(ds) for ds in datasets}) > 1

    @pytest.mark.parametrize("workers", [1, 3])
    def test_workers_make_the_same_batches(self, folder: Path, workers: int) -> None:
        for rank, part in enumerate(read(ranks(folder, 6, NAMES))):
            ds = make(folder, rank=rank, world_size=6, nodes=NAMES)
            batches = DataLoader(ds.batched(), batch_size=None, num_workers=workers, multiprocessing_context="fork")
            if rank in (0, 5):
                assert ids(batches) == part


def _at(ds: ShardDataset, epoch: int) -> ShardDataset:
    ds.set_epoch(epoch)
    return ds


def _plan(ds: ShardDataset) -> NodePlan:
    plan = ds._definition.plan(ds._cell.next_pass())
    assert isinstance(plan, NodePlan)
    return plan


class TestRestarts:
    @pytest.mark.parametrize(
        ("world", "names"),
        [
            (6, ["c", "c", "a", "a", "b", "b"]),  # renumbered
            (6, ["b", "c", "a", "b", "c", "a"]),
            (8, [*NAMES, "d", "d"]),
            (4, ["c", "c", "a", "a"]),
            (4, ["c", "c", "new", "new"]),
            (1, None),
        ],
    )
    def test_lanes_stay_where_they_are_as_far_as_they_can(self, folder: Path, world: int, names: Any) -> None:
        whole = joined([ids(make(folder, lanes=12).batched())])
        before = ranks(folder, 6, NAMES, lanes=12)
        begun = joined(read(before, 2))
        state = make(folder, rank=0, world_size=6, nodes=NAMES, lanes=12).state_at(2)
        after = ranks(folder, world, names, state)
        rest = read(after)
        assert begun + joined(rest) == whole
        if names is None:
            return
        tables = [ds.state_at(0) for ds in ranks(folder, world, names, state)]
        assert all(table == tables[0] for table in tables)
        old, new = (_table(s) for s in (state, tables[0]))
        each = 12 // len(set(names))
        assert [new.count(name) for name in dict.fromkeys(names)] == [each] * len(set(names))
        assert sum(a == b for a, b in zip(old, new, strict=True)) == sum(min(old.count(n), each) for n in set(names))

    def test_three_times_in_a_row_by_other_nodes(self, folder: Path) -> None:
        whole = joined([ids(make(folder, lanes=12).batched())])
        state, seen = None, []
        for world, names in ((6, NAMES), (4, ["c", "d", "c", "d"]), (8, ["x"] * 4 + ["d"] * 4), (3, ["d", "a", "c"])):
            seen += joined(read(ranks(folder, world, names, state, lanes=12), 2))[:2]
            [first] = ranks(folder, world, names, state, lanes=12)[:1]
            state = first.state_at(2) if len(seen) < 6 else state
        assert seen[:6] == whole

    def test_a_copy_and_its_workers_have_the_table(self, folder: Path) -> None:
        state = make(folder, rank=0, world_size=6, nodes=["z", "z", *NAMES[2:]]).state_at(2)
        [ds] = ranks(folder, 6, NAMES, state)[:1]
        wanted = ids(ranks(folder, 6, NAMES, state)[0].batched())
        for other in (copy.deepcopy(ds), pickle.loads(pickle.dumps(ds))):
            assert ids(other.batched()) == wanted
        batches = DataLoader(ds.batched(), batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert ids(batches) == wanted


def _table(state: Any) -> list[str]:
    return [state["nodes"][place] for place in state["node_of_lane"]]


class FakeJob:
    """Four ranks that a launcher started on two nodes."""

    def __init__(self, host: str, store: FakeKeys | None) -> None:
        self._host = host
        self._store = store

    def launcher(self) -> dict[str, str]:
        return {"WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}

    def keys(self, world: int, nodes: int) -> FakeKeys | None:
        return self._store

    def meeting(self) -> FakeKeys | None:
        return self._store

    def host(self) -> str:
        return self._host

    def in_worker(self) -> bool:
        return find_worker() is not None


def launched(
    folder: Path, store: FakeKeys | None, hosts: Sequence[str] = ("x", "y"), **options: Any
) -> list[ShardDataset]:
    """Four ranks; all have told their nodes' names if there is a store that answers."""
    made = [make(folder, rank=rank, world_size=4, **options) for rank in range(4)]
    for rank, ds in enumerate(made):
        definition: Any = ds._definition
        definition.nodes = NodeTables(None, FakeJob(hosts[rank // 2], store))
        if store is not None and not store.silent:
            definition.nodes.tell(definition.place)
    return made


class TestLaunched:
    def test_names_come_from_the_job_s_store_and_lanes_follow_them(self, folder: Path) -> None:
        whole = joined([ids(make(folder, lanes=8).batched())])
        datasets = launched(folder, FakeKeys())
        assert joined(read(datasets, 2)) == whole[:2]
        states = [ds.state_at(2) for ds in datasets]
        assert all(state == states[0] for state in states)
        assert (states[0]["nodes"], states[0]["lanes"]) == (["x", "y"], 8)
        for hosts, kept in ((("y", "x"), 8), (("z", "x"), 4), (("v", "w"), 0)):
            after = launched(folder, FakeKeys(), hosts)
            for ds in after:
                ds.load_state_dict(states[0])
            tables = [_table(ds.state_at(0)) for ds in after]
            assert tables == [tables[0]] * 4
            assert sum(a == b for a, b in zip(tables[0], _table(states[0]), strict=True)) == kept
            assert joined(read(after)) == whole[2:]

    def test_without_a_store_nodes_are_numbered(self, folder: Path) -> None:
        datasets = launched(folder, None)
        assert datasets[3].state_at(1)["nodes"] == ["node-0", "node-1"]
        assert joined(read(datasets)) == joined(read([make(folder, lanes=8)]))

    def test_nothing_is_asked_before_it_is_needed(self, folder: Path) -> None:
        store = FakeKeys()
        store.silent = True
        datasets = launched(folder, store)
        assert len(datasets[0]) == 36 and datasets[0].steps == 6
        with pytest.raises(NearflashError, match="does not answer"):
            datasets[0].state_at(1)
        with pytest.raises(NearflashError, match="does not answer"):
            list(datasets[0])

    def test_names_are_agreed_before_workers_start(self, folder: Path) -> None:
        store = FakeKeys()
        datasets = launched(folder, store)
        batches = DataLoader(_Saving(datasets[0]), batch_size=None, num_workers=2, multiprocessing_context="fork")
        assert list(batches) == [["x", "y"]] * 2

    def test_workers_that_nobody_saw_starting_write_no_table(self, folder: Path) -> None:
        [ds, *_] = launched(folder, FakeKeys())
        assert list(DataLoader(_Hidden(ds), batch_size=None, num_workers=1, multiprocessing_context="fork")) == [[]]


class TestMeetingAnew:
    """The process group was made anew: ranks that lived on must agree with those that are new."""

    SETTINGS = OrderSettings(seed=0, lanes=8, block_shards=1, shuffle=True, exchange=False, balance="bytes", cut=False)

    def test_names_are_told_and_agreed_again(self) -> None:
        job, others = FakeJob("a", FakeKeys()), FakeJob("b", FakeKeys())
        others._store = job._store
        survivor, gone = NodeTables(None, job), NodeTables(None, others)
        gone.tell(Place(2, 4))
        before = survivor.table(Place(0, 4), self.SETTINGS)
        assert gone.table(Place(2, 4), self.SETTINGS) == before and set(before) == {"a", "b"}
        job._store = FakeKeys()  # the survivor is the second node now
        joined = NodeTables(None, FakeJob("c", job._store))
        joined.tell(Place(0, 4))
        survivor.tell(Place(2, 4))
        assert job._store.held["node/1"] == b"a"
        tables = []
        for one, place in ((survivor, Place(2, 4)), (joined, Place(0, 4))):
            settings = replace(self.SETTINGS, table=one.remember(before))
            split = one.split(place, settings)
            assert split is not None
            tables.append((one.table(place, settings), split.node_of_lane.tolist()))
        assert tables[0] == tables[1]
        assert set(tables[0][0]) == {"a", "c"}

    def test_without_a_meeting_none_is_remembered(self) -> None:
        job = FakeJob("a", FakeKeys())
        tables = NodeTables(None, job)
        assert job._store is not None
        job._store.set("node/1", "b")
        assert set(tables.table(Place(0, 4), self.SETTINGS)) == {"a", "b"}
        job._store = None
        assert set(tables.table(Place(0, 4), self.SETTINGS)) == {"node-0", "node-1"}

    def test_a_copy_asks_for_itself(self) -> None:
        job = FakeJob("a", FakeKeys())
        assert job._store is not None
        job._store.set("node/1", "b")
        tables = NodeTables(None, job)
        wanted = tables.table(Place(0, 4), self.SETTINGS)
        made: NodeTables = pickle.loads(pickle.dumps(tables))
        assert made.table(Place(0, 4), self.SETTINGS) == wanted
        made._job = FakeJob("a", FakeKeys())
        assert isinstance(made._job, FakeJob) and made._job._store is not None
        made._job._store.set("node/1", "z")
        assert set(made.table(Place(0, 4), self.SETTINGS)) == {"a", "z"}


class InWorker(FakeJob):
    def in_worker(self) -> bool:
        return True

    def keys(self, world: int, nodes: int) -> FakeKeys | None:
        raise AssertionError("a worker asks nobody")


class TestWorkers:
    """What a worker makes of what the process that started it handed to it."""

    SETTINGS = OrderSettings(seed=0, lanes=4, block_shards=1, shuffle=True, exchange=False, balance="bytes", cut=False)
    PLACE = Place(3, 4)

    def worker(self, parent: NodeTables) -> NodeTables:
        parent.hand(self.PLACE)
        made: NodeTables = pickle.loads(pickle.dumps(parent))
        made._job = InWorker("z", None)
        return made

    def parent(self, *names: str, silent: bool = False) -> NodeTables:
        keys = FakeKeys()
        for number, name in enumerate(names):
            keys.set(f"node/{number}", name)
        keys.silent = silent
        return NodeTables(None, FakeJob("z", keys))

    def test_they_have_the_names_that_were_agreed(self) -> None:
        parent = self.parent("x", "y")
        settings = replace(self.SETTINGS, table=parent.remember(("y", "x", "y", "gone")))
        for tables in (parent, self.worker(parent)):
            assert tables.table(self.PLACE, self.SETTINGS) == ("x", "x", "y", "y")
            assert tables.table(self.PLACE, settings) == ("y", "x", "y", "x")
            split = tables.split(self.PLACE, settings)
            assert split is not None and (split.lanes.tolist(), split.node, split.runs) == ([0, 2], 1, (2, 2))

    def test_they_raise_what_went_wrong_when_they_were_started(self) -> None:
        worker = self.worker(self.parent("x", "y", silent=True))
        with pytest.raises(NearflashError, match="does not answer"):
            worker.table(self.PLACE, self.SETTINGS)
        assert worker.split(self.PLACE, self.SETTINGS) is not None  # which takes no names

    def test_without_names_they_repair_no_table(self) -> None:
        worker: NodeTables = self.parent("x", "y")
        worker._job = InWorker("z", None)
        assert worker.table(self.PLACE, self.SETTINGS) == ()
        with pytest.raises(StateError, match="give nodes= their names"):
            worker.split(self.PLACE, replace(self.SETTINGS, table=worker.remember(("y",) * 4)))

    def test_they_refuse_a_table_that_came_after_they_were_started(self) -> None:
        parent = self.parent("x", "y")
        worker = self.worker(parent)
        settings = replace(self.SETTINGS, table=parent.remember(("y",) * 4))
        for ask in (worker.split, worker.table):
            with pytest.raises(StateError, match="make a new DataLoader"):
                ask(self.PLACE, settings)

    def test_one_table_has_one_number_everywhere(self) -> None:
        numbers = [self.parent("x").remember(table) for table in (("a", "b"), ("a", "b"), ("b", "a"), ("ab",), ())]
        assert numbers[0] == numbers[1] != numbers[2] and len(set(numbers)) == 4 and numbers[4] == 0
        settings = replace(self.SETTINGS, table=numbers[0])
        assert OrderWords().unpack(OrderWords().pack(settings)) == settings


class _Saving(torch.utils.data.IterableDataset[Any]):
    """In each worker: the nodes in its state after its first batch. ``team`` shows the data set to the iterator."""

    def __init__(self, ds: ShardDataset) -> None:
        self.ds = ds
        self.team = ds.team

    def __iter__(self) -> Any:
        next(iter(self.ds.batched()))
        yield self.ds.state_dict()["nodes"]


class _Hidden(_Saving):
    def __init__(self, ds: ShardDataset) -> None:
        super().__init__(ds)
        del self.team


class TestPrefetch:
    def test_only_what_the_node_reads_is_asked_for(self, folder: Path) -> None:
        seen: list[set[int]] = []
        for rank in (0, 5):
            ds = make(folder, rank=rank, world_size=6, nodes=3, lanes=12, block_shards=2)
            plan = _plan(ds)
            asked = set(plan.order.uses_from(0, plan.lanes()).shard.tolist())
            assert shards(ids(ds.batched())) <= asked and len(asked) == 16
            seen.append(asked)
        assert not seen[0] & seen[1]

    def test_also_what_it_takes_of_its_neighbours_lanes(self, folder: Path) -> None:
        """Five lanes for three nodes: of the one in the middle the nodes beside it take some samples."""
        for rank in range(3):
            plan = _plan(make(folder, rank=rank, world_size=3, nodes=3, lanes=5))
            positions = plan.positions(0)
            assert set(plan.split.lanes.tolist()) <= set(plan.lanes().tolist())
            assert set(plan.order.lane_of(positions).tolist()) <= set(plan.lanes().tolist())
            assert len(plan.lanes()) < 5


class TestRefusals:
    @pytest.mark.parametrize("nodes", [0, -1, True, [], "ab", [1, 2], ["a", ""], {"a", "b"}])
    def test_what_cannot_be_nodes(self, nodes: Any) -> None:
        with pytest.raises(ConfigError, match="nodes="):
            ShardDataset("nowhere", batch_size=2, nodes=nodes)

    def test_what_does_not_fit_the_ranks(self, folder: Path) -> None:
        with pytest.raises(ConfigError, match="4 ranks cannot be divided among nodes=3"):
            len(make(folder, rank=0, world_size=4, nodes=3))
        with pytest.raises(ConfigError, match="nodes of 2 ranks, but there are 4"):
            len(make(folder, rank=0, world_size=4, nodes=["a", "b"]))

    def test_launchers_are_believed_only_of_their_own_ranks(self) -> None:
        tables = NodeTables(None, FakeJob("x", None))
        assert [tables.count(Place(0, world)) for world in (1, 2, 4, 8)] == [1, 1, 2, 1]


class TestBalance:
    def test_lanes_of_equally_many_samples(self, tmp_path: Path) -> None:
        write_mds(tmp_path, [1, 30] * 16)
        counts: dict[str, list[int]] = {}
        for balance in ("bytes", "samples"):
            ds = make(tmp_path, lanes=4, balance=balance)
            order = ds._definition.order(None, 0)
            counts[balance] = order.plan.lengths.tolist()
            assert ds.state_at(1)["balance"] == balance
            again = make(tmp_path)
            again.load_state_dict(ds.state_at(1))
            assert ids(again.batched()) == ids(ds.batched())[1:]
        assert max(counts["samples"]) - min(counts["samples"]) <= 1

    def test_not_where_counts_come_while_reading(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [1] * 64)
        ds = make(tmp_path, balance="samples")
        with pytest.raises(ConfigError, match=r'counted while it is read .*use balance="bytes"'):
            list(ds)
        with pytest.raises(ConfigError, match="neither 'bytes' nor 'samples'"):
            make(tmp_path, balance="files")
