"""What is done to a sample: decoding, projection, numbers, transforms, and what stands in for damaged ones."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import loader
from cachefs.errors import ConfigError, DataError, FormatError, MissingField
from loader import DataWarning, ShardDataset
from loader.testing import tar_bytes, write_mds, write_tars


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def npy(array: np.ndarray[Any, Any]) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


PIXELS = np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)
FIELDS = {
    "txt": "é".encode(),
    "cls": b"12\n",
    "json": b'{"a": 1}',
    "seg.png": png(PIXELS[:, :, 0]),
    "png": png(PIXELS),
    "npy": npy(np.arange(4, dtype=np.float32)),
    "bin": b"raw",
}


@pytest.fixture
def one(tmp_path: Path) -> Path:
    path = tmp_path / "one.tar"
    path.write_bytes(tar_bytes([(f"k.{name}", value) for name, value in FIELDS.items()]))
    return path


def first(path: Path, **options: Any) -> Any:
    return next(iter(ShardDataset(path, batch_size=1, **options)))


class TestDecode:
    def test_by_default_text_numbers_and_json_are_values_and_the_rest_views(self, one: Path) -> None:
        sample = first(one)
        assert (sample["txt"], sample["cls"], sample["json"], sample["__key__"]) == ("é", 12, {"a": 1}, "k")
        assert sample["npy"].tolist() == [0, 1, 2, 3] and sample["npy"].dtype == np.float32
        for name in ("png", "seg.png", "bin"):
            assert sample[name].dtype == np.uint8 and sample[name].tobytes() == FIELDS[name]

    def test_bytes_leaves_all_as_stored(self, one: Path) -> None:
        sample = first(one, decode="bytes")
        assert {name: value.tobytes() for name, value in sample.items() if name != "__key__"} == FIELDS
        assert io.BytesIO(sample["bin"]).read() == b"raw"
        assert torch.frombuffer(sample["bin"], dtype=torch.uint8).tolist() == list(b"raw")

    def test_pil(self, one: Path) -> None:
        sample = first(one, decode="pil")
        assert np.array_equal(np.asarray(sample["png"]), PIXELS)
        assert sample["seg.png"].mode == "L" and sample["txt"] == "é"

    def test_torch(self, one: Path) -> None:
        sample = first(one, decode="torch")
        assert sample["png"].shape == (3, 5, 7) and sample["png"].dtype == torch.uint8
        assert np.array_equal(sample["png"].permute(1, 2, 0).numpy(), PIXELS)
        assert sample["seg.png"].shape == (1, 5, 7)
        assert sample["npy"].tolist() == [0, 1, 2, 3] and sample["npy"].dtype == torch.float32
        assert sample["bin"].tolist() == list(b"raw") and sample["cls"] == 12

    def test_functions_by_field_and_their_case(self, one: Path) -> None:
        sample = first(one, decode={"BIN": bytes, "cls": lambda raw: raw.tobytes()})
        assert (sample["bin"], sample["cls"], sample["txt"]) == (b"raw", b"12\n", "é")

    @pytest.mark.parametrize(
        ("field", "value", "decode"),
        [
            ("cls", b"x", None),
            ("json", b"{", None),
            ("txt", b"\xff", None),
            ("png", b"no image", "pil"),
            ("npy", b"no", "torch"),
        ],
    )
    def test_a_value_that_cannot_be_decoded_is_named(
        self, tmp_path: Path, field: str, value: bytes, decode: Any
    ) -> None:
        path = tmp_path / "bad.tar"
        path.write_bytes(tar_bytes([(f"k.{field}", value)]))
        with pytest.raises(FormatError, match=rf"bad\.tar: field '{field}' of sample 0 cannot be decoded") as error:
            first(path, decode=decode)
        assert "\n" not in str(error.value)

    def test_a_pickle_in_an_npy_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "bad.tar"
        path.write_bytes(tar_bytes([("k.npy", npy(np.array([{}], dtype=object)))]))
        with pytest.raises(FormatError, match="array of Python objects"):
            first(path, decode="torch")


class TestFields:
    def test_only_those_asked_for(self, one: Path) -> None:
        assert list(first(one, fields=["CLS", "txt"])) == ["__key__", "txt", "cls"]

    def test_an_absent_one_is_an_error_that_lists_those_present(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tar"
        path.write_bytes(tar_bytes([("a.jpg", b"1"), ("a.json", b"1"), ("b.jpg", b"2")]))
        ds = ShardDataset(path, batch_size=1, shuffle=False, fields=["jpg", "json"])
        iterator = iter(ds)
        assert next(iterator)["json"] == 1
        with pytest.raises(
            MissingField, match=r"x\.tar: sample 1 has no field 'json' \(fields present: __key__, jpg\)"
        ):
            next(iterator)

    def test_with_skip_such_a_sample_is_a_bad_one(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tar"
        path.write_bytes(tar_bytes([("a.jpg", b"1"), ("a.json", b"1"), ("b.jpg", b"2")]))
        ds = ShardDataset(path, batch_size=2, shuffle=False, fields=["jpg", "json"], on_error="skip")
        with pytest.warns(DataWarning, match="has no field 'json'"):
            assert [s["__key__"] for s in ds] == ["a", "a"]

    def test_mds_columns_keep_their_case(self, tmp_path: Path) -> None:
        write_mds(tmp_path, [2])
        assert set(first(tmp_path, fields=["id"])) == {"id"}
        with pytest.raises(MissingField, match="'ID'"):
            first(tmp_path, fields=["ID"])


class TestTransform:
    def test_random_numbers_depend_on_seed_epoch_and_sample_only(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [5, 4])

        def draw(sample: Any, rng: np.random.Generator) -> dict[str, Any]:
            return {"id": sample["__id__"], "x": rng.random()}

        def table(epoch: int, **options: Any) -> dict[int, float]:
            ds = ShardDataset(tmp_path, transform=draw, ids=True, **{"batch_size": 1, **options})
            ds.set_epoch(epoch)
            return {sample["id"]: sample["x"] for sample in ds}

        base = table(0)
        assert len(set(base.values())) == 9
        assert table(0) == table(0, batch_size=3) == base
        assert not set(base.values()) & set(table(1).values())
        assert not set(base.values()) & set(table(0, seed=1).values())
        halves = [table(0, rank=rank, world_size=2, global_batch_size=2, batch_size=None) for rank in (0, 1)]
        assert {**halves[0], **halves[1]}.items() <= base.items()

    def test_it_may_return_anything(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [4])
        ds = ShardDataset(tmp_path, batch_size=2, transform=lambda s, rng: (s["bin"], s["cls"]))
        left, right = next(iter(ds.batched()))
        assert left.shape == (2, 40) and right.dtype == torch.int64

    def test_an_exception_in_it_names_shard_and_sample(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [1])
        ds = ShardDataset(tmp_path, batch_size=1, on_error="skip", transform=lambda s, rng: 1 / 0)
        with pytest.raises(ZeroDivisionError) as error:
            list(ds)
        assert error.value.__notes__ == [f"in the transform of sample 0 of shard 0: {tmp_path / '000.tar'}"]


class TestSkip:
    """Sample k of the tar is bad where ``cls`` is no number; a bad one never shifts the order."""

    def build(self, tmp_path: Path, good: str) -> Path:
        path = tmp_path / "x.tar"
        path.write_bytes(tar_bytes([(f"{k}.cls", str(k).encode() if c == "g" else b"bad") for k, c in enumerate(good)]))
        return path

    @pytest.mark.parametrize(
        ("good", "batch_size", "wanted"),
        [
            ("ggbg", 4, [0, 1, 1, 3]),
            ("bggg", 4, [1, 1, 2, 3]),
            ("bbgb", 4, [2, 2, 2, 2]),
            ("ggbbgg", 2, [0, 1, 1, 1, 4, 5]),
            ("bbgggg", 2, [2, 2, 2, 3, 4, 5]),
            ("gbgb", 1, [0, 0, 2, 2]),
        ],
    )
    def test_stand_ins(self, tmp_path: Path, good: str, batch_size: int, wanted: list[int]) -> None:
        def make() -> ShardDataset:
            return ShardDataset(self.build(tmp_path, good), batch_size=batch_size, shuffle=False, on_error="skip")

        ds = make()
        with pytest.warns(DataWarning, match="damaged samples are skipped"):
            assert [sample["cls"] for sample in ds] == wanted
        warnings.simplefilter("ignore", DataWarning)
        assert ds.skipped == good.count("b")
        for taken in range(0, len(good), batch_size):  # a resumed run stands in the same samples
            again = make()
            again.load_state_dict(again.state_at(taken // batch_size))
            assert [sample["cls"] for sample in again] == wanted[taken:]

    def test_a_stand_in_is_a_copy(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tar"
        path.write_bytes(tar_bytes([("a.bin", b"good"), ("b.bin", b"1"), ("b.BIN", b"2")]))
        with pytest.warns(DataWarning):
            good, copy = ShardDataset(path, batch_size=2, shuffle=False, on_error="skip")
        copy["bin"][:] = 0
        assert good["bin"].tobytes() == b"good"

    def test_nothing_good_far_and_wide_is_an_error(self, tmp_path: Path) -> None:
        ds = ShardDataset(self.build(tmp_path, "b" * 40), batch_size=1, shuffle=False, on_error="skip")
        with pytest.warns(DataWarning), pytest.raises(DataError, match=r"no readable sample near.*'cls' of sample 0"):
            list(ds)

    def test_without_skip_the_first_bad_one_ends_the_epoch(self, tmp_path: Path) -> None:
        iterator = iter(ShardDataset(self.build(tmp_path, "gb"), batch_size=1, shuffle=False))
        assert next(iterator)["cls"] == 0
        with pytest.raises(FormatError):
            next(iterator)

    def test_a_whole_mds_shard_that_is_damaged_keeps_its_places(self, tmp_path: Path) -> None:
        write_mds(tmp_path, [2, 2, 2])
        (tmp_path / "shard.00001.mds").write_bytes(b"junk")
        ds = ShardDataset(tmp_path, batch_size=2, shuffle=False, on_error="skip")
        with pytest.warns(DataWarning, match=r"shard\.00001\.mds"):
            assert [sample["id"] for sample in ds] == [0, 1, 1, 1, 4, 5]
        assert ds.skipped == 2


class TestCollate:
    def test_what_agrees_is_stacked_and_the_rest_is_listed(self) -> None:
        rows = [
            {"a": np.ones((2, 3), np.uint16), "r": np.zeros(k), "s": "x", "i": k, "f": 0.5, "b": k > 1, "n": None,
             "h": np.float16(k), "t": torch.ones(2), "d": {"x": k}, "p": (k, "y"), "big": 2**70}
            for k in (1, 2)
        ]  # fmt: skip
        batch = loader.collate(rows)
        assert batch["a"].shape == (2, 2, 3) and batch["a"].dtype == torch.uint16
        assert [len(r) for r in batch["r"]] == [1, 2]
        assert batch["s"] == ["x", "x"] and batch["n"] == [None, None] and batch["big"] == [2**70, 2**70]
        assert batch["i"].tolist() == [1, 2] and batch["i"].dtype == torch.int64
        assert batch["f"].tolist() == [0.5, 0.5] and batch["b"].dtype == torch.bool
        assert batch["h"].dtype == torch.float16 and batch["t"].shape == (2, 2)
        assert batch["d"]["x"].tolist() == [1, 2] and batch["p"][0].tolist() == [1, 2] and batch["p"][1] == ["y", "y"]

    def test_a_difference_in_fields_says_what_to_do(self) -> None:
        with pytest.raises(DataError, match=r"differ in the field\(s\) b, c \(choose fields="):
            loader.collate([{"a": 1, "b": 2}, {"a": 1, "c": 2}])
        with pytest.raises(DataError, match="empty list"):
            loader.collate([])

    def test_mixed_types_are_listed(self) -> None:
        assert loader.collate([{"x": 1}, {"x": "1"}])["x"] == [1, "1"]
        assert loader.collate([{"x": np.ones(2)}, {"x": np.ones(2, np.int8)}])["x"][1].dtype == np.int8

    def test_another_batch_size_than_the_data_set_s_is_noticed(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [8])
        for size in (2, 8):  # a loader that collates for itself; DataLoader is told when it asks for samples
            samples = list(ShardDataset(tmp_path, batch_size=4))[:size]
            with pytest.raises(ConfigError, match=f"a batch of {size} samples, but the data set deals batches of 4"):
                loader.collate(samples)

    def test_torch_s_own_collate_keeps_the_stamp(self, tmp_path: Path) -> None:
        write_tars(tmp_path, [8])
        ds = ShardDataset(tmp_path, batch_size=4)
        [first, _] = torch.utils.data.DataLoader(ds, batch_size=4)
        assert first["bin"].shape == (4, 40)
        assert ds.state_after(first) == ds.state_at(1)
