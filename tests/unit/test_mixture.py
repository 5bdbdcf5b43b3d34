"""Mixtures as they are read: sources as they are alone, where epochs end, what samples say, what is refused."""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import loader
from cachefs.errors import ConfigError, DataError, EmptyDataset, StateError
from loader import Mixture, ShardDataset
from loader.formats import Tokens
from loader.testing import write_mds, write_tars, write_tokens

COUNTS = {"a": [7, 0, 11, 4, 8], "b": [3, 2], "c": [1]}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    for name, counts in COUNTS.items():
        write_tars(folder / name, counts)
    for name, size in (("x", 640), ("y", 96)):
        for number in range(3):
            write_tokens(folder / "tokens" / name / f"{number}.bin", size + 32 * number)
    write_mds(folder / "mds", [5, 6])
    write_tars(folder / "long", [100, 100, 77])
    return folder


def noise(sample: Any, rng: np.random.Generator) -> Any:
    sample["noise"] = int(rng.integers(1 << 60))
    return sample


def source(root: Path, name: str, **options: Any) -> ShardDataset:
    return ShardDataset(root / name, **{"batch_size": 1, "seed": ord(name[0]), "lanes": 2, **options})


def mix(root: Path, batch: int = 4, of: str = "abc", own: Any = None, **options: Any) -> Mixture:
    sources = {name: source(root, name, **(own or {})) for name in of}
    return Mixture(sources, **{"global_batch_size": batch, "weights": [6, 3, 1][: len(of)], "ids": True, **options})


def pairs(samples: Any) -> list[tuple[int, int]]:
    return [(sample["__source__"], sample["__id__"]) for sample in samples]


def of_batch(batch: Any) -> list[tuple[int, int]]:
    return list(zip(batch["__source__"].tolist(), batch["__id__"].tolist(), strict=True))


class TestSources:
    def test_each_is_read_as_it_is_alone_epoch_after_epoch(self, root: Path) -> None:
        """Order, random numbers of the transform and all: those of the source's own epochs."""
        mixture = mix(root, own={"transform": noise})
        read: dict[int, list[Any]] = {0: [], 1: [], 2: []}
        for _ in range(3):
            for sample in mixture:
                read[sample["__source__"]].append((sample["__id__"], sample["noise"], bytes(sample["bin"])))
        for number, name in enumerate("abc"):
            alone = source(root, name, transform=noise, ids=True)
            own: list[Any] = []
            while len(own) < len(read[number]):
                own += [(sample["__id__"], sample["noise"], bytes(sample["bin"])) for sample in alone]
            assert read[number] == own[: len(read[number])]

    def test_they_may_be_of_any_format_each_with_its_own_fields_and_decoding(self, root: Path) -> None:
        tars = ShardDataset(root / "a", batch_size=1, fields=["bin"], decode={"bin": lambda view: len(view)})
        mds = ShardDataset(root / "mds", batch_size=1, fields=["blob"])
        mixture = Mixture([tars, mds], global_batch_size=2, weights=[1, 1], ids=True)
        assert mixture.names == ("0", "1")
        for sample in mixture:
            assert ("bin" in sample) == (sample["__source__"] == 0)
            assert ("blob" in sample) == (sample["__source__"] == 1)
            assert sample["__source__"] == 1 or sample["bin"] == 40
        with pytest.raises(DataError, match="differ in the field"):
            list(mixture.batched())

    def test_one_of_packed_documents_is_packed_anew_in_each_of_its_epochs(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        for name, count in (("x", 40), ("y", 9)):
            (tmp_path / name).mkdir()
            docs = [rng.integers(1, 1000, rng.integers(1, 9)).tolist() for _ in range(count)]
            pq.write_table(pa.table({"ids": docs}), tmp_path / name / "docs.parquet")

        def packed(name: str) -> ShardDataset:
            return source(tmp_path, name, ids=True, packing=loader.Packing(16, field="ids"))

        mixture = Mixture([packed("x"), packed("y")], weights=[1, 1], samples=30, global_batch_size=5, ids=True)
        read: list[list[Any]] = [[], []]
        for sample in mixture:
            read[sample["__source__"]].append((sample["__id__"], sample["ids"].tolist()))
        for own, alone in zip(read, (packed("x"), packed("y")), strict=True):
            expected: list[Any] = []
            while len(expected) < len(own):
                expected += [(sample["__id__"], sample["ids"].tolist()) for sample in alone]
            assert own == expected[: len(own)]

    @pytest.mark.parametrize("of", ["bc", "long"])
    def test_what_is_written_into_a_sample_is_not_there_in_a_later_epoch_of_its_source(
        self, root: Path, of: str
    ) -> None:
        """Of a source that is copied, and of one whose epochs have maps of their own."""
        names = ["long", "c"] if of == "long" else list(of)
        sources = {name: source(root, name) for name in names}
        mixture = Mixture(sources, global_batch_size=4, weights=[9, 1], samples=700, ids=True)
        seen: Counter[tuple[int, int]] = Counter()
        for sample in mixture:
            assert bytes(sample["bin"][:1]) != b"\xff"
            sample["bin"][:] = 0xFF
            seen[sample["__source__"], sample["__id__"]] += 1
        assert max(seen.values()) > 1

    def test_threads_read_a_source_over_the_ends_of_its_epochs(self, root: Path) -> None:
        def make() -> Mixture:
            sources = {"long": source(root, "long", transform=noise), "b": source(root, "b", transform=noise)}
            return Mixture(sources, global_batch_size=10, weights=[9, 1], samples=1000, ids=True)

        expected = [(sample["__id__"], sample["noise"]) for sample in make()]
        with loader.Loader(make(), threads=4) as made:
            found = [
                pair for batch in made for pair in zip(*(batch[n].tolist() for n in ("__id__", "noise")), strict=True)
            ]
        assert found == expected

    def test_one_with_weight_zero_is_not_even_listed(self, root: Path, tmp_path: Path) -> None:
        sources = {"gone": ShardDataset(tmp_path / "nowhere", batch_size=1), "a": source(root, "a")}
        mixture = Mixture(sources, global_batch_size=4, weights={"a": 1, "gone": 0}, ids=True)
        assert {number for number, _ in pairs(mixture)} == {1}
        assert mixture.names == ("gone", "a")
        assert mixture.proportions == {"gone": 0, "a": 1}
        assert [one["name"] for one in mixture.state_dict()["sources"]] == ["a"]

    def test_many_more_than_a_batch_has_samples(self, root: Path) -> None:
        sources = [source(root, "abc"[number % 3], seed=number) for number in range(40)]
        mixture = Mixture(sources, global_batch_size=3, weights=[1] * 40, samples=1280, ids=True)
        counts = Counter(number for number, _ in pairs(mixture))
        assert len(counts) == 40 and sum(counts.values()) == 1278
        assert all(abs(count - 32) < 4 for count in counts.values())

    def test_a_damaged_sample_is_replaced_by_one_of_its_own_source(self, root: Path) -> None:
        def fails(view: Any) -> Any:
            if bytes(view[:1]) == b"3":
                raise ValueError("damaged")
            return bytes(view[:2])

        sources = {
            "a": source(root, "a", decode={"bin": fails}, on_error="skip", fields=["bin"]),
            "b": source(root, "b", fields=["cls"]),
        }
        mixture = Mixture(sources, global_batch_size=4, weights=[1, 1], ids=True, samples=60)
        with pytest.warns(loader.DataWarning, match="damaged"):
            samples = list(mixture)
        assert mixture.skipped > 0
        assert all(("bin" in sample) == (sample["__source__"] == 0) for sample in samples)
        assert len(samples) == 60 and all(not sample["bin"].startswith(b"3") for sample in samples if "bin" in sample)


class TestEpochs:
    def test_all_ends_once_every_source_was_read_and_first_once_one_was(self, root: Path) -> None:
        for weights in ([6, 3, 0], [1, 1, 1], [1, 7, 2]):
            seen = pairs(mix(root, batch=1, weights=weights))
            sizes = [sum(counts) for counts, weight in zip(COUNTS.values(), weights, strict=True) if weight]
            counts = Counter(number for number, _ in seen)
            assert all(counts[number] >= size for number, size in enumerate(sizes))
            less = Counter(number for number, _ in seen[:-1])
            assert any(less[number] < size for number, size in enumerate(sizes))
            seen = pairs(mix(root, batch=1, weights=weights, stop="first"))
            counts = Counter(number for number, _ in seen)
            assert [number for number, size in enumerate(sizes) if counts[number] == size] == [seen[-1][0]]
            assert all(counts[number] <= size for number, size in enumerate(sizes))

    def test_the_next_one_goes_on_where_one_ended(self, root: Path) -> None:
        """However they are cut, epochs are one sequence: with a last batch that is left out, filled, or short."""
        whole = mix(root, batch=1, samples=400)
        sequence = pairs(whole)
        for options in (
            {},
            {"stop": "first", "weights": [6, 3, 1]},
            {"samples": 26},
            {"samples": 26, "drop_last": False},
        ):
            mixture = mix(root, batch=3, **options)
            read: list[Any] = []
            for _ in range(5):
                epoch = pairs(mixture)
                assert len(epoch) == len(mixture) == mixture.total
                read += epoch
            assert read == sequence[: len(read)]
        assert len(pairs(mix(root, batch=4, samples=26))) == 24
        assert len(pairs(mix(root, batch=4, samples=26, drop_last=False))) == 26
        assert len(pairs(mix(root, batch=4, samples=26, drop_last=False, within="batch"))) == 24

    def test_repeat_says_how_often_each_is_read(self, root: Path) -> None:
        mixture = mix(root, batch=1, weights=None, repeat={"a": 1, "b": 4, "c": 10})
        assert len(mixture) == 30 + 20 + 10
        assert mixture.proportions == pytest.approx({"a": 1 / 2, "b": 1 / 3, "c": 1 / 6})
        counts = Counter(number for number, _ in pairs(mixture))
        assert sum(counts.values()) == 60

    def test_repeat_means_what_is_written(self, root: Path, tmp_path: Path) -> None:
        """In floats 1.1 times 100 is more than 110."""
        write_tars(tmp_path / "hundred", [60, 40])
        hundred, b = source(tmp_path, "hundred"), source(root, "b")
        assert len(Mixture([hundred], repeat=[1.1], batch_size=1)) == 110
        mixture = Mixture([hundred, b], repeat=[1.1, 0.2], batch_size=1)
        assert len(mixture) == 111
        assert mixture._definition.shares == (110, 1)

    def test_without_weights_sources_are_mixed_by_size_and_a_temperature_evens_that_out(self, root: Path) -> None:
        assert mix(root, weights=None).proportions == pytest.approx({"a": 30 / 36, "b": 5 / 36, "c": 1 / 36})
        even = mix(root, weights=None, temperature=float("inf")).proportions
        assert even == pytest.approx({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
        roots = np.sqrt([30, 5, 1])
        half = mix(root, weights=None, temperature=2).proportions
        assert list(half.values()) == pytest.approx(list(roots / roots.sum()))

    def test_set_epoch_chooses_one(self, root: Path) -> None:
        mixture = mix(root)
        epochs = [pairs(mixture) for _ in range(4)]
        for epoch in (3, 1, 2, 0):
            mixture.set_epoch(epoch)
            assert pairs(mixture) == epochs[epoch]
        assert len({tuple(epoch) for epoch in epochs}) == 4

    def test_set_epoch_back_to_the_beginning_of_a_resumed_one_loses_nothing(self, root: Path) -> None:
        """Resumed at another batch size it would end elsewhere than when it is read whole."""
        sequence = pairs(mix(root, batch=1, samples=400))
        mixture = mix(root, batch=5, samples=26)
        mixture.load_state_dict(mix(root, batch=4, samples=26).state_at(2))
        assert pairs(mixture) == sequence[8:23]
        mixture.set_epoch(0)
        assert pairs(mixture) + pairs(mixture) == sequence[:50]
        mixture.load_state_dict(mix(root, batch=4, samples=26).state_at(2))
        mixture.set_epoch(1)
        assert pairs(mixture) == sequence[23:48]

    def test_padding_repeats_the_beginning_and_says_so(self, root: Path) -> None:
        mixture = mix(root, batch=4, samples=26, pad=True)
        first, second = (list(mixture) for _ in range(2))
        assert [sample["__repeat__"] for sample in first] == [False] * 26 + [True] * 2
        assert pairs(first[26:]) == pairs(first[:2])
        assert pairs([*first[:26], *second[:26]]) == pairs(mix(root, batch=1, samples=400))[:52]

    def test_ranks_read_the_same_global_batches(self, root: Path) -> None:
        whole = [of_batch(batch) for batch in mix(root, batch=4).batched()]
        ranks = [mix(root, batch=4, rank=rank, world_size=2) for rank in range(2)]
        parts = [[of_batch(batch) for batch in rank.batched()] for rank in ranks]
        assert [one + other for one, other in zip(*parts, strict=True)] == whole
        by_rank = Mixture([source(root, "a"), source(root, "b")], batch_size=2, rank=1, world_size=2)
        assert len(by_rank.batched()) * 2 == len(by_rank)


def test_the_order_of_a_mixture_stays_what_it_is(root: Path) -> None:
    """A change of this breaks the states of running jobs."""
    assert [(number, sample >> 32, sample & 0xFF) for number, sample in pairs(islice(mix(root, seed=9), 16))] == [
        (1, 0, 1),
        (0, 4, 3),
        (2, 0, 0),
        (0, 2, 7),
        (1, 0, 2),
        (0, 4, 7),
        (0, 2, 5),
        (1, 0, 0),
        (1, 1, 0),
        (1, 1, 1),
        (1, 0, 0),
        (0, 4, 1),
        (0, 2, 3),
        (0, 4, 4),
        (2, 0, 0),
        (1, 0, 2),
    ]


class TestTokens:
    def make(self, root: Path, format: Tokens | None = None, **options: Any) -> Mixture:
        format = format or Tokens(length=16, labels=True, out="int64")
        sources = [source(root, f"tokens/{name}", format=format) for name in "xy"]
        return Mixture(sources, **{"global_batch_size": 6, "weights": [2, 1], "ids": True, "samples": 60, **options})

    @pytest.mark.parametrize("format", [Tokens(length=16), Tokens(length=16, stride=8, labels=True, out="int64")])
    @pytest.mark.parametrize("options", [{}, {"ids": False}, {"pad": True, "samples": 57}, {"within": "batch"}])
    def test_batches_are_gathered_and_are_what_collate_makes_of_the_samples(
        self, root: Path, format: Tokens, options: dict[str, Any]
    ) -> None:
        slow = self.make(root, format, **options)
        expected = [loader.collate(list(chunk)) for chunk in _chunks(list(slow), 6)]
        for made in (self.make(root, format, **options).batched(), loader.Loader(self.make(root, format, **options))):
            found = list(made)
            assert len(found) == len(expected) == 10
            for one, other in zip(found, expected, strict=True):
                assert one.keys() == other.keys()
                assert all(torch.equal(one[name], other[name]) for name in one)

    def test_the_rows_of_a_batch_are_taken_in_one_call(self, root: Path) -> None:
        from loader.batched import token_gather

        with self.make(root).begin_pass() as reading:
            assert token_gather(reading, None) is not None
        unlike = [source(root, "tokens/x", format=Tokens(length=16)), source(root, "tokens/y", format=Tokens(length=8))]
        mixture = Mixture(unlike, global_batch_size=6, weights=[2, 1])
        with mixture.begin_pass() as reading:
            assert token_gather(reading, None) is None
        assert {len(sample["tokens"]) for sample in mixture} == {8, 16}


def _chunks(samples: list[Any], size: int) -> list[list[Any]]:
    return [samples[at : at + size] for at in range(0, len(samples), size)]


class TestStates:
    def test_one_is_small_and_says_where_each_source_stands(self, root: Path) -> None:
        mixture = mix(root)
        for number in range(5):
            state = json.loads(json.dumps(mixture.state_at(number)))
            assert state["position"] == 4 * number
            assert len(json.dumps(state)) < 1500
        list(islice(mixture, 37))
        state = mixture.state_dict()
        stands = [(one["name"], one["epoch"] * sum(COUNTS[one["name"]]) + one["position"]) for one in state["sources"]]
        read = Counter(number for number, _ in pairs(islice(mix(root), 37)))
        assert stands == [(name, read[number]) for number, name in enumerate("abc")]

    def test_a_run_goes_on_between_two_samples_and_with_threads(self, root: Path) -> None:
        whole = pairs(mix(root))
        for cut in range(1, len(whole), 5):
            mixture = mix(root)
            assert pairs(islice(mixture, cut)) == whole[:cut]
            state = json.loads(json.dumps(mixture.state_dict()))
            resumed = mix(root)
            resumed.load_state_dict(state)
            assert pairs(resumed) == whole[cut:]
        with loader.Loader(mix(root), threads=2) as made:
            batches = [of_batch(batch) for batch in islice(made, 5)]
            state = made.state_dict()
        with loader.Loader(mix(root), threads=3) as made:
            made.load_state_dict(state)
            batches += [of_batch(batch) for batch in made]
        assert [pair for batch in batches for pair in batch] == whole

    @pytest.mark.parametrize(
        "options", [{"pad": True}, {"drop_last": False}, {"pad": True, "within": "batch"}, {"stop": "first"}]
    )
    def test_a_run_goes_on_from_any_sample_however_an_epoch_ends(self, root: Path, options: dict[str, Any]) -> None:
        own = {"weights": [6, 3, 2], "samples": 26, "drop_last": True, **options}
        if "stop" in own:
            own.update(samples=None, weights=[9, 1, 0])
        mixture = mix(root, **own)
        whole = [pair for _ in range(3) for pair in pairs(mixture)]
        for cut in (0, 1, 6, 23, 24, 25, 26, 27, 31):
            mixture = mix(root, **own)
            samples, read = iter(mixture), 0
            while read < cut:
                found = next(samples, None)
                samples, read = (iter(mixture), read) if found is None else (samples, read + 1)
            resumed = mix(root, **own)
            resumed.load_state_dict(json.loads(json.dumps(mixture.state_dict())))
            rest = pairs(resumed) + pairs(resumed)
            assert rest == whole[cut : cut + len(rest)]

    @pytest.mark.parametrize("cut", [1, 3, 5, 7, 19, 20, 23])
    @pytest.mark.parametrize("samples", [5, 20, 27])
    def test_a_padded_epoch_that_is_shorter_than_a_batch_goes_on_from_any_sample(
        self, root: Path, samples: int, cut: int
    ) -> None:
        own: dict[str, Any] = {"batch": 20, "samples": samples, "within": "batch", "pad": True}
        own["weights"] = [1, 1, 1]

        def read(mixture: Mixture, count: int) -> list[tuple[int, int, bool]]:
            out: list[tuple[int, int, bool]] = []
            while len(out) < count:
                for sample in islice(mixture, count - len(out)):
                    out.append((sample["__source__"], sample["__id__"], sample["__repeat__"]))
            return out

        whole = read(mix(root, **own), 60)
        mixture = mix(root, **own)
        assert read(mixture, cut) == whole[:cut]
        state = json.loads(json.dumps(mixture.state_dict()))
        resumed = mix(root, **own)
        resumed.load_state_dict(state)
        assert read(resumed, 60 - cut) == whole[cut:]

    @pytest.mark.parametrize("options", [{"stop": "first"}, {"samples": 31, "drop_last": False}, {"pad": True}])
    def test_many_ranks_go_on_from_within_a_batch_and_their_states_load(
        self, root: Path, options: dict[str, Any]
    ) -> None:
        """One rank stops between two samples, two go on, and one again after any of their batches."""
        own: dict[str, Any] = {"weights": [1, 1, 0], **options}
        sequence = pairs(mix(root, batch=1, weights=[1, 1, 0], samples=200))
        for cut in (3, 5, 7):
            alone = mix(root, batch=4, **own)
            assert pairs(islice(alone, cut)) == sequence[:cut]
            state = json.loads(json.dumps(alone.state_dict()))
            for batches in range(8):
                two = mix(root, batch=2, rank=0, world_size=2, **own)
                two.load_state_dict(state)
                between = json.loads(json.dumps(two.state_at(batches)))
                again = mix(root, batch=2, rank=1, world_size=2, **own)
                again.load_state_dict(between)
                assert again.state_at(0) == between
                one = mix(root, batch=4, **own)
                one.load_state_dict(between)
                assert between["begin"] + between["position"] >= cut
                at = between["begin"] + between["position"]
                if not own.get("pad"):
                    assert at == cut + 2 * batches
                assert pairs(islice(one, 2)) == sequence[at : at + 2]

    def test_a_state_among_repeats_needs_the_epoch_it_was_saved_in(self, root: Path) -> None:
        own: dict[str, Any] = {"batch": 20, "samples": 26, "pad": True}
        mixture = mix(root, **own)
        list(islice(mixture, 33))
        state = mixture.state_dict()
        mix(root, **own).load_state_dict(state)
        for options in ({"samples": 60}, {"pad": False, "drop_last": False}):
            with pytest.raises(StateError, match=r"samples= .*pad="):
                mix(root, **{**own, **options}).load_state_dict(state)

    def test_the_state_says_the_seed_and_the_sources_orders(self, root: Path) -> None:
        before = mix(root, seed=4)
        expected = pairs(before)
        other = mix(root, seed=5, own={"lanes": 1, "seed": 77})
        other.load_state_dict(mix(root, seed=4).state_at(2))
        assert pairs(other) == expected[8:]
        assert pickle.loads(pickle.dumps(other)).names == other.names

    def test_another_mixtures_is_refused_with_the_reason(self, root: Path) -> None:
        state = mix(root).state_at(3)
        for reason, mixture in {
            "weights": mix(root, weights=[6, 3, 2]),
            "'a', 'b', not of": mix(root),
            "data set": Mixture(
                {"a": source(root, "b"), "b": source(root, "a"), "c": source(root, "c")},
                global_batch_size=4,
                weights=[6, 3, 1],
            ),
        }.items():
            wrong = mix(root, of="ab").state_at(3) if "not of" in reason else state
            with pytest.raises(StateError, match=reason):
                mixture.load_state_dict(wrong)
        with pytest.raises(StateError, match="not the state of a mixture"):
            mix(root).load_state_dict(source(root, "a").state_dict())
        with pytest.raises(StateError, match="not a loader state"):
            source(root, "a").load_state_dict(state)

    @pytest.mark.parametrize(
        "damage",
        [
            {"position": -1},
            {"begin": 2**49},
            {"block": 0},
            {"format": 2},
            {"mixing": 2},
            {"order": 99},
            {"seed": "1"},
            {"stop": 3},
            {"stop": True},
            {"block": 2**47},
            {"sources": 5},
            {"sources": [5]},
            {"position": 40},
        ],
    )
    def test_a_damaged_one_is_told(self, root: Path, damage: dict[str, Any]) -> None:
        mixture = mix(root)
        with pytest.raises(StateError):
            mixture.load_state_dict({**mixture.state_at(3), **damage})

    def test_an_end_beyond_every_sequence_is_told(self, root: Path) -> None:
        mixture = mix(root)
        state = mixture.state_at(mixture.steps + 1)
        assert state["begin"] > 0
        with pytest.raises(StateError, match="beyond every sequence"):
            mixture.load_state_dict({**state, "stop": 2**48})

    @pytest.mark.parametrize(
        "damage",
        [{"position": 30}, {"epoch": 2**44}, {"lanes": 0}, {"lanes": 2**47}, {"share": -1}, {"cut": 1}, {"name": 3}],
    )
    def test_a_damaged_source_is_told(self, root: Path, damage: dict[str, Any]) -> None:
        mixture = mix(root)
        state = mixture.state_at(3)
        state["sources"][0] = {**state["sources"][0], **damage}
        with pytest.raises(StateError):
            mixture.load_state_dict(state)

    def test_sources_go_on_when_one_is_added_and_weights_change(self, root: Path) -> None:
        before = mix(root, of="ab")
        used = pairs(islice(before, 20))
        state = before.state_dict()
        after = mix(root, weights=[1, 1, 8], samples=40)
        after.load_state_dict(json.loads(json.dumps(after.remixed(state))))
        assert after.epoch == 1  # the one in which the weights changed is over
        used += pairs(after)
        for number, name in enumerate("ab"):
            own = [sample for source_number, sample in used if source_number == number]
            alone = source(root, name, ids=True)
            expected: list[int] = []
            while len(expected) < len(own):
                expected += [sample["__id__"] for sample in alone]
            assert own == expected[: len(own)]
        with pytest.raises(StateError, match="state of one DataLoader worker"):
            after.remixed({**state, "worker": {"index": 0, "count": 2, "batch": 3, "size": 4}})
        other = Mixture({"a": source(root, "b")}, global_batch_size=1)
        with pytest.raises(StateError, match="remixed"):
            other.remixed(state)


class TestArguments:
    @pytest.mark.parametrize(
        ("options", "says"),
        [
            ({"weights": [1, 2]}, "one number for each of 3"),
            ({"weights": 3}, "one number for each of 3"),
            ({"weights": "abc"}, "one number for each of 3"),
            ({"weights": np.ones((3, 1))}, "one number for each of 3"),
            ({"weights": np.array([True, True, True])}, "source 'a'"),
            ({"weights": [1, "2", 3]}, "source 'b'"),
            ({"weights": [1, 1j, 3]}, "source 'b'"),
            ({"weights": {"a": 1, "b": 2}}, "differ in c"),
            ({"weights": [1, -2, 0]}, "source 'b'"),
            ({"weights": [0, 0, 0]}, "no source"),
            ({"repeat": [1, 1, 1]}, "weights or repeat"),
            ({"weights": None, "repeat": [1, 1, 1], "temperature": 2}, "temperature or repeat"),
            ({"temperature": 0}, "temperature"),
            ({"stop": "last"}, "stop"),
            ({"stop": "first", "samples": 3}, "stop and samples"),
            ({"samples": 0}, "samples=0"),
            ({"within": "shard"}, "within"),
            ({"global_batch_size": None}, "batch_size"),
            ({"batch_size": 3}, "batch_size"),
            ({"seed": 1.5}, "seed"),
        ],
    )
    def test_wrong_ones_are_told(self, root: Path, options: dict[str, Any], says: str) -> None:
        with pytest.raises(ConfigError, match=says):
            mix(root, **options)

    @pytest.mark.parametrize("kind", ["int64", "float32", "float64", "uint8"])
    def test_numbers_of_numpy_are_numbers(self, root: Path, kind: str) -> None:
        weights = np.array([7, 2, 1], dtype=kind) / (10 if kind.startswith("float") else 1)
        weights = weights.astype(kind)
        assert mix(root, weights=weights)._definition.shares == (7, 2, 1)
        assert mix(root, weights=dict(zip("abc", weights, strict=True)))._definition.shares == (7, 2, 1)

    def test_what_is_no_data_set_is_told(self, root: Path) -> None:
        sources: Sequence[Any]
        for sources in ([root / "a"], [mix(root)], []):
            with pytest.raises(ConfigError, match=r"no ShardDataset|no sources"):
                Mixture(sources, batch_size=1)

    def test_an_empty_source_and_a_batch_too_large_are_told(self, root: Path, tmp_path: Path) -> None:
        write_tars(tmp_path / "empty", [0, 0])
        with pytest.raises(EmptyDataset, match="no sample"):
            len(Mixture([source(root, "a"), ShardDataset(tmp_path / "empty", batch_size=1)], batch_size=2))
        with pytest.raises(EmptyDataset, match="not enough for one global batch"):
            len(mix(root, batch=40, stop="first"))

    def test_it_can_be_described_and_counted(self, root: Path) -> None:
        mixture = mix(root)
        assert repr(mixture) == "<Mixture of a, b, c>"
        mixture.count()
        assert mixture.estimated_len() == len(mixture)
        assert mixture.skipped == 0
