"""Where the user is: states at every position, epochs that advance by themselves, other ranks and batch sizes."""

from __future__ import annotations

import copy
import json
import pickle
import tempfile
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import loader
from cachefs.errors import ConfigError, EmptyDataset, StateError
from loader import ShardDataset
from loader.testing import write_mds, write_tars, write_tokens


@pytest.fixture(scope="module")
def thirty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("thirty")
    write_tars(folder, [7, 0, 11, 4, 8])
    return folder


def make(folder: Path, batch_size: int = 4, **options: Any) -> ShardDataset:
    return ShardDataset(folder, **{"batch_size": batch_size, "ids": True, "seed": 5, **options})


def ids(samples: Iterator[Any] | ShardDataset) -> list[int]:
    return [sample["__id__"] for sample in samples]


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """As a checkpoint brings it back."""
    out: dict[str, Any] = json.loads(json.dumps(state))
    return out


class TestEpochs:
    @pytest.mark.parametrize("options", [{}, {"exchange": True, "lanes": 1}, {"lanes": 3, "block_shards": 1}])
    def test_each_pass_is_the_next_epoch_and_every_sample_comes_once(self, thirty: Path, options: Any) -> None:
        ds = make(thirty, batch_size=1, **options)
        epochs = [ids(ds) for _ in range(3)]
        assert len({tuple(epoch) for epoch in epochs}) == 3
        everything = [shard << 32 | i for shard, count in enumerate([7, 0, 11, 4, 8]) for i in range(count)]
        assert all(sorted(epoch) == everything for epoch in epochs)

    def test_set_epoch_chooses_one(self, thirty: Path) -> None:
        ds = make(thirty)
        epochs = [ids(ds) for _ in range(3)]
        for epoch in (2, 0, 1):
            ds.set_epoch(epoch)
            assert ds.epoch == epoch
            assert ids(ds) == epochs[epoch]
            assert ds.epoch == epoch + 1
        for wrong in (-1, True, "1"):
            with pytest.raises(StateError, match="set_epoch"):
                ds.set_epoch(wrong)  # type: ignore[arg-type]

    def test_a_pass_that_was_broken_off_is_followed_by_the_next_epoch(self, thirty: Path) -> None:
        ds = make(thirty)
        first, second = ids(make(thirty)), ids(_at_epoch(make(thirty), 1))
        assert ids(islice(ds, 9)) == first[:9]
        assert ds.epoch == 1
        assert ds.state_dict()["epoch"] == 0  # the user is within the pass that was broken off
        assert ids(ds) == second
        ds.set_epoch(0)
        assert ids(ds) == first

    def test_taking_the_last_sample_finishes_the_pass(self, thirty: Path) -> None:
        ds = make(thirty)
        iterator = iter(ds)
        for _ in range(len(ds)):
            next(iterator)
        assert ds.epoch == 1
        assert ids(ds) == ids(_at_epoch(make(thirty), 1))
        assert list(iterator) == []
        assert ds.epoch == 2

    def test_without_shuffle_it_is_the_data_set_s_own_order(self, thirty: Path) -> None:
        ds = make(thirty, batch_size=1, shuffle=False, decode="bytes")
        for _ in range(2):
            assert [bytes(s["bin"]).partition(b":")[0] for s in ds] == [str(k).encode() for k in range(30)]

    def test_seeds_give_other_orders(self, thirty: Path) -> None:
        assert ids(make(thirty)) == ids(make(thirty)) != ids(make(thirty, seed=6))


def _at_epoch(ds: ShardDataset, epoch: int) -> ShardDataset:
    ds.set_epoch(epoch)
    return ds


class TestResume:
    @pytest.mark.parametrize("batch_size", [1, 4, 5, 7])
    @pytest.mark.parametrize("drop_last", [True, False])
    def test_at_every_sample(self, thirty: Path, batch_size: int, drop_last: bool) -> None:
        def fresh() -> ShardDataset:
            return make(thirty, batch_size, drop_last=drop_last)

        first, second = (ids(_at_epoch(fresh(), epoch)) for epoch in (0, 1))
        for taken in range(len(first) + 1):
            ds = fresh()
            iterator = iter(ds)
            for _ in range(taken):
                next(iterator)
            state = stored(ds.state_dict())
            again = fresh()
            again.load_state_dict(state)
            assert again.state_dict() == state
            if taken < len(first):
                assert ids(again) == first[taken:]
            assert ids(again) == second
            assert len(again) == len(first)

    @given(st.integers(1, 11), st.integers(1, 8), st.booleans(), st.booleans(), st.data())
    @settings(max_examples=30, deadline=None)
    def test_within_batches_padded_or_not(
        self, count: int, batch_size: int, drop_last: bool, pad: bool, data: st.DataObject
    ) -> None:
        """Read, save, go on anew, save there too: the rest of the pass comes as it would have, repeats and all."""
        assume(pad or not drop_last or count >= batch_size)
        with tempfile.TemporaryDirectory() as name:
            write_tokens(Path(name) / "t.bin", 2 * count)

            def fresh(state: dict[str, Any] | None) -> ShardDataset:
                format = loader.formats.Tokens(length=2)
                ds = make(Path(name), batch_size, drop_last=drop_last, pad=pad, format=format)
                if state is not None:
                    ds.load_state_dict(state)
                    assert ds.state_dict() == state
                return ds

            def marked(samples: Any) -> list[Any]:
                return [(sample["__id__"], sample.get("__repeat__")) for sample in samples]

            whole, following = (marked(_at_epoch(fresh(None), epoch)) for epoch in (0, 1))
            state, pieces = None, []
            while len(pieces) < len(whole):
                ds = fresh(state)
                pieces += marked(islice(ds, data.draw(st.integers(1, len(whole) - len(pieces)))))
                state = stored(ds.state_dict())
            assert pieces == whole
            assert marked(fresh(state)) == following

    def test_at_every_batch_of_every_rank(self, thirty: Path) -> None:
        for world in (1, 2, 3):
            for rank in range(world):
                options = {"rank": rank, "world_size": world}
                whole = [b["__id__"].tolist() for b in make(thirty, 3, **options).batched()]
                for taken in range(len(whole)):
                    state = stored(make(thirty, 3, **options).state_at(taken))
                    ds = make(thirty, 3, **options)
                    ds.load_state_dict(state)
                    assert [b["__id__"].tolist() for b in ds.batched()] == whole[taken:]

    def test_states_of_states(self, thirty: Path) -> None:
        """Read 7, 5, 5 and the rest, each in a new process as it were: joined they are one pass."""
        for batch_size in (1, 3, 5):
            whole = ids(make(thirty, batch_size))
            pieces: list[int] = []
            state: dict[str, Any] | None = None
            for count in (7, 5, 5, None):
                ds = make(thirty, batch_size)
                if state is not None:
                    ds.load_state_dict(state)
                    assert ds.state_dict() == state
                pieces += ids(islice(ds, count))
                state = stored(ds.state_dict())
            assert pieces == whole

    def test_a_state_at_the_end_starts_the_next_epoch(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [12, 8])
        ds = make(tmp_path)
        list(ds)
        again = make(tmp_path)
        again.load_state_dict(stored(ds.state_dict()))
        assert ids(again) == ids(_at_epoch(make(tmp_path), 1))
        assert len(ids(again)) == 20

    def test_a_resumed_epoch_is_short_and_the_next_ones_are_not(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [12, 8])
        ds = make(tmp_path)
        iterator = iter(ds.batched())
        next(iterator), next(iterator)
        again = make(tmp_path)
        again.load_state_dict(stored(ds.state_dict()))
        assert [len(list(again.batched())) for _ in range(3)] == [3, 5, 5]

    def test_state_after_a_batch(self, thirty: Path) -> None:
        ds = make(thirty)
        batches = list(ds.batched())
        for number, batch in enumerate(batches):
            state = make(thirty).state_after(batch)
            assert state == make(thirty).state_at(number + 1)
        samples = list(make(thirty))
        assert make(thirty).state_after(samples[4:8]) == make(thirty).state_at(2)
        for wrong in ({"a": 1}, [], (), [1], None):
            with pytest.raises(StateError, match=r"collate_fn=loader\.collate"):
                ds.state_after(wrong)

    def test_state_at_counts_over_epochs_from_the_last_load(self, thirty: Path) -> None:
        ds = make(thirty)  # 7 batches an epoch
        assert ds.state_at(0)["epoch"] == 0
        assert (ds.state_at(9)["epoch"], ds.state_at(9)["position"]) == (1, 8)
        list(ds)
        assert ds.state_at(9)["epoch"] == 1
        ds.load_state_dict(ds.state_at(9))
        assert (ds.state_at(5)["epoch"], ds.state_at(6)["epoch"]) == (2, 2)
        assert ds.state_at(5)["position"] == 0
        with pytest.raises(StateError, match="negative"):
            ds.state_at(-1)

    def test_set_epoch_after_loading_keeps_the_place_in_that_epoch(self, thirty: Path) -> None:
        state = make(thirty).state_at(10)
        ds = make(thirty)
        ds.load_state_dict(state)
        ds.set_epoch(1)
        assert ds.state_dict() == state
        ds.set_epoch(2)
        assert ids(ds) == ids(_at_epoch(make(thirty), 2))

    def test_the_state_decides_how_the_order_is_made(self, thirty: Path) -> None:
        whole = ids(make(thirty, seed=-9, lanes=2, block_shards=1))
        state = stored(make(thirty, seed=-9, lanes=2, block_shards=1).state_at(3))
        ds = make(thirty, seed=1, shuffle=False)
        ds.load_state_dict(state)
        assert ds.state_dict() == state
        assert ids(ds) == whole[12:]
        large = stored(make(thirty, seed=2**64 - 1).state_at(3))
        ds.load_state_dict(large)
        assert ds.state_dict() == large

    def test_copies_and_pickles_go_on_where_the_original_is(self, thirty: Path) -> None:
        ds = make(thirty)
        ds.load_state_dict(ds.state_at(2))
        whole = ids(make(thirty))
        for other in (copy.deepcopy(ds), pickle.loads(pickle.dumps(ds))):
            assert ids(other) == whole[8:]
        assert ids(ds) == whole[8:]


class TestElastic:
    @pytest.mark.parametrize("worlds", [(1, 2), (2, 1), (2, 3), (3, 4)])
    def test_global_batches_are_the_same_for_every_number_of_ranks(self, thirty: Path, worlds: tuple[int, int]) -> None:
        whole = [
            b["__id__"].tolist() for b in make(thirty, None, global_batch_size=12, drop_last=False, pad=True).batched()
        ]
        before, after = worlds

        def rest(world: int, state: dict[str, Any] | None, count: int | None) -> list[list[int]]:
            ranks = []
            for rank in range(world):
                ds = make(thirty, None, global_batch_size=12, pad=True, rank=rank, world_size=world)
                if state is not None:
                    ds.load_state_dict(state)
                ranks.append([b["__id__"].tolist() for b in islice(ds.batched(), count)])
            return [list(chain(*parts)) for parts in zip(*ranks, strict=True)]

        assert rest(before, None, None) == whole
        state = stored(make(thirty, None, global_batch_size=12, pad=True, rank=0, world_size=before).state_at(1))
        assert rest(before, None, 1) + rest(after, state, None) == whole

    def test_another_batch_size_goes_on_at_the_same_sample(self, thirty: Path) -> None:
        whole = ids(make(thirty, 4, drop_last=False))
        ds = make(thirty, 7, drop_last=False)
        ds.load_state_dict(make(thirty, 4, drop_last=False).state_at(3))
        assert ids(ds) == whole[12:]

    def test_a_rest_too_short_for_a_larger_batch_goes_on_in_the_next_epoch(self, thirty: Path) -> None:
        ds = make(thirty, 16)
        ds.load_state_dict(make(thirty, 4).state_at(6))  # 6 samples left
        assert (ds.state_dict()["epoch"], ds.state_dict()["position"]) == (1, 0)

    def test_within_a_batch_of_many_ranks_there_is_no_common_state(self, thirty: Path) -> None:
        ds = make(thirty, 4, rank=0, world_size=2)
        iterator = iter(ds)
        next(iterator)
        with pytest.raises(StateError, match="whole number of batches"):
            ds.state_dict()
        for _ in range(3):
            next(iterator)
        assert ds.state_dict() == ds.state_at(1)


class TestRanks:
    @pytest.mark.parametrize("counts", [[8], [2, 1, 2, 1, 2]])
    @pytest.mark.parametrize("options", [{"drop_last": False, "pad": True}, {"drop_last": True}])
    def test_the_union_is_each_sample_once(self, tmp_path: Path, counts: list[int], options: dict[str, Any]) -> None:
        write_tars(tmp_path, counts)
        parts = [ids(make(tmp_path, 1, rank=rank, world_size=3, **options)) for rank in range(3)]
        lengths = {len(part) for part in parts}
        assert lengths == ({3} if options.get("pad") else {2})  # 8 samples: 9 with a repeat, or 6
        everything = {shard << 32 | i for shard, count in enumerate(counts) for i in range(count)}
        union = list(chain(*parts))
        if options.get("pad"):
            assert set(union) == everything and len(union) == 9
        else:
            assert len(set(union)) == len(union) == 6

    def test_repeats_are_marked(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [5])
        samples = list(make(tmp_path, 4, pad=True))
        assert [s["__repeat__"] for s in samples] == [False] * 5 + [True] * 3
        assert ids(iter(samples[5:])) == ids(iter(samples[:3]))
        assert [b["__repeat__"].tolist() for b in make(tmp_path, 4, pad=True).batched()][1] == [False, True, True, True]

    def test_a_last_batch_that_not_all_ranks_have_a_part_of_is_refused(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [7])
        with pytest.raises(ConfigError, match="leave some of the 3 ranks without"):
            len(make(tmp_path, 2, rank=0, world_size=3, drop_last=False))

    def test_a_data_set_too_small_for_one_batch_says_so(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [3])
        with pytest.raises(EmptyDataset, match="not enough for one global batch of 4"):
            list(make(tmp_path, 4))

    @pytest.mark.parametrize("options", [{}, {"drop_last": False}, {"pad": True}])
    def test_len_is_what_is_yielded(self, thirty: Path, options: dict[str, Any]) -> None:
        for batch_size in (1, 4, 30):
            for world in (1, 2):
                for rank in range(world):
                    ds = make(thirty, batch_size // world or 1, rank=rank, world_size=world, **options)
                    assert len(ds) == len(list(ds))
                    assert len(ds.batched()) == len(list(ds.batched())) == ds.steps


class TestRefusals:
    def test_the_state_of_another_data_set(self, thirty: Path, tmp_path: Path) -> None:
        write_mds(tmp_path, [30])
        with pytest.raises(StateError, match="belongs to data set"):
            make(tmp_path).load_state_dict(make(thirty).state_at(1))

    @pytest.mark.parametrize(
        "damage",
        [
            {"kind": "x"},
            {"position": -1},
            {"position": "4"},
            {"stop": 1},
            {"stop": "x"},
            {"stop": 10**9},
            {"stop": 2**70},
            {"epoch": 2**70},
            {"epoch": 2**62},
            {"position": 2**70},
            {"next_lane": 2**70},
            {"seed": 2**64},
            {"seed": -(2**63) - 1},
            {"seed": "x"},
            {"lanes": 2**70},
            {"block_shards": 2**70},
            {"worker": {"index": 0, "count": 2, "batch": 1}},
            {"next_lane": 3},
            {"format": 99},
        ],
    )
    def test_states_that_are_none(self, thirty: Path, damage: dict[str, Any]) -> None:
        ds = make(thirty)
        with pytest.raises(StateError) as error:
            ds.load_state_dict({**ds.state_at(1), **damage})
        assert "\n" not in str(error.value)

    def test_an_epoch_beyond_all_is_refused(self, thirty: Path) -> None:
        for wrong in (2**62, 2**70):
            with pytest.raises(StateError, match="set_epoch"):
                make(thirty).set_epoch(wrong)

    @pytest.mark.parametrize(
        "options",
        [
            {"batch_size": 0},
            {"batch_size": True},
            {"batch_size": None},
            {"batch_size": 2, "global_batch_size": 4},
            {"batch_size": 2, "lanes": 0},
            {"batch_size": 2, "seed": "x"},
            {"batch_size": 2, "seed": True},
            {"batch_size": 2, "seed": 2**64},
            {"batch_size": 2, "seed": None},
            {"batch_size": 2, "on_error": "ignore"},
            {"batch_size": 2, "decode": "jpeg"},
            {"batch_size": 2, "decode": {"a": 1}},
            {"batch_size": 2, "transform": lambda sample: sample},
            {"batch_size": 2, "format": 7},
            {"batch_size": 2, "fields": "jpg"},
        ],
    )
    def test_arguments_are_checked_at_once(self, options: dict[str, Any]) -> None:
        with pytest.raises(ConfigError):
            loader.ShardDataset("nowhere", **options)

    def test_half_a_rank(self, thirty: Path) -> None:
        with pytest.raises(ConfigError, match="go together"):
            len(make(thirty, rank=1))
        with pytest.raises(ConfigError, match="rank 3 of world size 2"):
            len(make(thirty, rank=3, world_size=2))


def test_token_sets_resume_too(tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", 1000)
    format = loader.formats.Tokens(length=16)
    whole = [b["tokens"].tolist() for b in make(tmp_path, format=format).batched()]
    ds = make(tmp_path, format=format)
    ds.load_state_dict(ds.state_at(5))
    assert [b["tokens"].tolist() for b in ds.batched()] == whole[5:]
