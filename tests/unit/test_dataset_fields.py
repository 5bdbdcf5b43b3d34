"""One rule for field names on every path, and what each kind of field becomes by default."""

from __future__ import annotations

import io
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import loader
from cachefs.errors import ConfigError, DataError, FormatError, MissingField
from loader import ShardDataset, collate
from loader.decode import Decode
from loader.formats import WebDataset
from loader.sample import FoldedSample, Sample
from loader.testing import mapped_at, tar_bytes


def saved(save: Any, value: Any) -> bytes:
    out = io.BytesIO()
    save(out, value)
    return out.getvalue()


def npy(value: Any) -> bytes:
    return saved(np.save, value)


def tar(folder: Path, *samples: dict[str, bytes]) -> Path:
    path = folder / "t.tar"
    path.write_bytes(tar_bytes([(f"{i}.{k}", v) for i, sample in enumerate(samples) for k, v in sample.items()]))
    return path


def read(path: Path, **options: Any) -> list[Any]:
    return list(ShardDataset(path, batch_size=1, shuffle=False, **options))


class TestLetterCase:
    """S01: the same rule wherever a field of a tar is named."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tar(tmp_path, {"JPG": b"1", "Left.png": b"2", "json": b"3"}, {"JPG": b"4", "Left.png": b"5"})

    @pytest.mark.parametrize("spelling", [str.lower, str.upper, str.title])
    def test_every_path_takes_every_spelling(self, path: Path, spelling: Any) -> None:
        jpg, left = spelling("jpg"), spelling("left.png")
        one, two = read(path, fields=[jpg, left], decode={left: bytes})
        assert list(one) == ["__key__", "jpg", "left.png"]
        assert (bytes(one[jpg]), one[left], two[left]) == (b"1", b"2", b"5")
        assert jpg in one and left in one and bytes(one.get(jpg)) == b"1" and one.get("x", 7) == 7
        batch = next(iter(ShardDataset(path, batch_size=2, shuffle=False, fields=[left]).batched()))
        assert batch[left].tolist() == [[50], [53]] and left in batch and spelling("cls") not in batch
        assert bytes(loader.open_shard(path)[0][jpg]) == b"1"

    def test_a_decoder_for_one_field_twice_is_refused(self, path: Path) -> None:
        with pytest.raises(ConfigError, match="names a field twice: JPG, jpg"):
            read(path, decode={"JPG": bytes, "jpg": bytes})

    def test_what_is_written_into_a_sample_keeps_its_name(self, path: Path) -> None:
        sample = read(path)[0]
        sample["Mine"] = 1
        assert sample["Mine"] == 1 and list(sample)[-1] == "Mine"
        with pytest.raises(MissingField, match="'mine'"):
            sample["mine"]

    def test_samples_and_batches_pickle(self, path: Path) -> None:
        sample = pickle.loads(pickle.dumps(read(path)[0]))
        assert isinstance(sample, FoldedSample) and bytes(sample["JPG"]) == b"1"
        batch = pickle.loads(pickle.dumps(collate([sample])))
        assert batch["JPG"].tolist() == [[49]]

    def test_other_formats_keep_case(self) -> None:
        sample = Sample(Name=1)
        assert sample["Name"] == 1 and "name" not in sample
        with pytest.raises(MissingField, match="no field 'name' in the sample"):
            sample["name"]


class TestAbsent:
    """An absent field is an error that lists those present on every path that asks for it."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tar(tmp_path, {"jpg": b"1", "json": b"3"}, {"jpg": b"4"})

    def test_asked_for_by_name(self, path: Path) -> None:
        one, two = read(path)
        assert one["json"] == 3
        for ask in (lambda: two["JSON"], lambda: collate([two])["JSON"]):
            with pytest.raises(MissingField, match=r"no field 'JSON' in the \w+ \(fields present: __key__, jpg\)"):
                ask()

    def test_asked_for_by_fields(self, path: Path) -> None:
        with pytest.raises(MissingField, match=r"sample 1 has no field 'json' \(fields present: __key__, jpg\)"):
            read(path, fields=["JSON"])
        assert len(read(path, fields=["jpg"])) == 2

    def test_a_batch_of_samples_that_differ(self, path: Path) -> None:
        with pytest.raises(DataError, match=r"differ in the field\(s\) json"):
            next(iter(ShardDataset(path, batch_size=2, shuffle=False).batched()))

    def test_a_decoder_waits_for_samples_that_have_its_field(self, path: Path) -> None:
        one, two = read(path, decode={"json": bytes})
        assert one["json"] == b"3" and "json" not in two


class TestArrays:
    ARRAYS = (
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.asfortranarray(np.arange(12, dtype=">i4").reshape(3, 4)),
        np.zeros((0, 5), np.int8),
        np.array(7, np.uint64),
        np.array([(1, 2.5)], dtype=[("a", "i2"), ("b", "f8")]),
    )

    @pytest.mark.parametrize("array", ARRAYS, ids=lambda a: str(a.dtype))
    def test_an_npy_is_a_view_of_its_own_bytes(self, tmp_path: Path, array: Any) -> None:
        path = tar(tmp_path, {"npy": npy(array), "x.npy": npy(array)})
        for name in ("npy", "x.npy"):
            value = read(path)[0][name]
            assert value.dtype == array.dtype and value.shape == array.shape and np.array_equal(value, array)
            assert value.flags.writeable
            if value.size and sys.platform == "linux":
                assert Path(mapped_at(value)[0]).samefile(path)

    def test_an_npy_becomes_a_tensor(self, tmp_path: Path) -> None:
        sample = read(tar(tmp_path, {"a.npy": npy(self.ARRAYS[0]), "b.npy": npy(self.ARRAYS[1])}), decode="torch")[0]
        assert sample["a.npy"].tolist() == self.ARRAYS[0].tolist() and sample["a.npy"].dtype == torch.float32
        assert sample["b.npy"].tolist() == self.ARRAYS[1].tolist() and sample["b.npy"].dtype == torch.int32

    def test_headers_of_all_versions_are_read(self, tmp_path: Path) -> None:
        for version, name in (((1, 0), "e"), ((2, 0), "e"), ((3, 0), "é")):
            array = np.array([(1.5,)], dtype=[(name, "f8")])
            raw = saved(lambda out, v, version=version: np.lib.format.write_array(out, v, version), array)
            assert read(tar(tmp_path, {"npy": raw}))[0]["npy"][name].tolist() == [1.5]

    GOOD = npy(np.arange(10, dtype=np.int64))

    @pytest.mark.parametrize(
        "raw",
        [
            b"",
            GOOD[:9],
            GOOD[:50],
            GOOD[:-1],
            GOOD + b"x",
            GOOD.replace(b"(10,)", b"(1<9)"),
            GOOD.replace(b"(10,)", b"(-1,)"),
            GOOD.replace(b"'<i8'", b"'<i9'"),
            GOOD.replace(b"'<i8'", b"'|O' "),
            npy(np.array([{}], dtype=object)),
            GOOD.replace(b"(10,), }     ", b"(9**9**9**9),"),
        ],
    )
    @pytest.mark.parametrize("decode", [None, "torch"])
    def test_a_damaged_or_hostile_one_is_named(self, tmp_path: Path, raw: bytes, decode: Any) -> None:
        path = tar(tmp_path, {"npy": raw})
        with pytest.raises(FormatError, match=r"t\.tar: field 'npy' of sample 0 cannot be decoded") as error:
            read(path, decode=decode)
        assert "\n" not in str(error.value)
        assert read(path, decode="bytes")[0]["npy"].tobytes() == raw


class Explosive:
    """Unpickling it is seen."""

    went_off = False

    def __reduce__(self) -> Any:
        return setattr, (Explosive, "went_off", True)


class TestPickles:
    @pytest.mark.parametrize("name", ["pkl", "pickle", "pyd", "a.PKL", "pt", "x.pth"])
    @pytest.mark.parametrize("decode", [None, "pil", {"cls": bytes}])
    def test_refused_by_name_with_the_ways_out(self, tmp_path: Path, name: str, decode: Any) -> None:
        path = tar(tmp_path, {name: pickle.dumps({"a": 1}), "cls": b"1"})
        with pytest.raises(
            ConfigError, match=rf"t\.tar: field '{name.lower()}' is a pickle.*fields=.*decode="
        ) as error:
            read(path, decode=decode, on_error="skip")
        assert ("decode='torch'" in str(error.value)) == (name.split(".")[-1] in ("pt", "pth"))
        assert read(path, fields=["cls"])[0].keys() == {"__key__", "cls"}
        assert pickle.loads(read(path, decode="bytes")[0][name]) == {"a": 1}
        assert read(path, decode={name: pickle.loads})[0][name] == {"a": 1}

    @pytest.mark.parametrize("name", ["pkl", "pickle", "pyd"])
    def test_torch_refuses_pickles_too(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigError, match="is a pickle"):
            read(tar(tmp_path, {name: pickle.dumps(1)}), decode="torch")

    @pytest.mark.parametrize("name", ["pt", "latent.pth"])
    def test_torch_loads_tensors_and_nothing_else(self, tmp_path: Path, name: str) -> None:
        value = {"x": torch.arange(3), "n": [1, "two"]}
        [sample] = read(tar(tmp_path, {name: saved(lambda out, v: torch.save(v, out), value)}), decode="torch")
        assert sample[name]["x"].tolist() == [0, 1, 2] and sample[name]["n"] == [1, "two"]
        hostile = saved(lambda out, v: torch.save(v, out), Explosive())
        for raw in (hostile, pickle.dumps(Explosive(), 2), b"", hostile[:100]):
            with pytest.raises(FormatError, match=rf"field '{name}' of sample 0 cannot be decoded") as error:
                read(tar(tmp_path, {name: raw}), decode="torch")
            assert "\n" not in str(error.value)
        assert not Explosive.went_off


class Kinds(WebDataset):
    def kind(self, index: Any, name: str) -> str:
        return "image" if name == "picture" else "json" if name == "j" else ""


class TestStructsAndNulls:
    def decoded(self, mode: Any, **fields: Any) -> Sample:
        shard: Any = SimpleNamespace(format=Kinds(), index=None, url="u", decoders={})
        sample = Sample(fields)
        Decode(mode)(sample, shard, 3)
        return sample

    def png(self) -> bytes:
        image = pytest.importorskip("PIL.Image").fromarray(np.arange(12, dtype=np.uint8).reshape(3, 4))
        return saved(lambda out, value: value.save(out, "png"), image)

    def test_a_struct_of_bytes_and_path_is_an_image(self) -> None:
        picture = {"bytes": self.png(), "path": "a.png"}
        assert self.decoded(None, picture=picture)["picture"] is picture
        assert self.decoded("pil", picture=picture)["picture"].size == (4, 3)
        assert self.decoded("torch", picture=picture)["picture"].shape == (1, 3, 4)
        assert self.decoded("pil", picture=self.png())["picture"].size == (4, 3)

    def test_one_that_is_only_a_path_is_named(self) -> None:
        with pytest.raises(FormatError, match=r"u: field 'picture' of sample 3 .* only its path 'a.png'"):
            self.decoded("pil", picture={"bytes": None, "path": "a.png"})

    @pytest.mark.parametrize("mode", [None, "pil", "torch", {"j": lambda value: 1 / 0}])
    def test_a_null_stays_one(self, mode: Any) -> None:
        assert self.decoded(mode, picture=None, j=None, other=None) == {"picture": None, "j": None, "other": None}
