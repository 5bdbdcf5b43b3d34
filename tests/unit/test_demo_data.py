"""The demo's text and shards: exact sizes, valid UTF-8, and files that say what they hold."""

from __future__ import annotations

import io
import json
import struct
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from demo.plan import FORMATS, FULL, SMALL, Plan
from demo.shards import make_shards, mds_header, write_mds, write_tar, write_tokens
from demo.text import Document, docstrings, stdlib_documents, windows
from loader import formats, open_shard

SAMPLES = [Document("a.py@0", b"first"), Document("b.py@7", "zweites é".encode())]


@given(
    texts=st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=5),
    count=st.integers(1, 20),
    length=st.integers(1, 16),
)
def test_windows_have_the_exact_length_and_are_utf8(texts: list[str], count: int, length: int) -> None:
    documents = [Document(f"d{i}", t.encode()) for i, t in enumerate(texts)]
    whole = b"".join(d.text for d in documents)
    if len(whole) < length:
        with pytest.raises(ValueError, match="do not hold"):
            windows(documents, count, length)
        return
    cut = windows(documents, count, length)
    assert [len(w.text) for w in cut] == [length] * count
    for window in cut:
        assert window.text.rstrip(b"\n").decode().encode() in whole
        name, _, at = window.name.rpartition("@")
        assert int(at) < len(next(d.text for d in documents if d.name == name))


def test_windows_do_not_overlap_where_there_is_text_enough() -> None:
    document = Document("d", bytes(range(97, 123)))
    assert [w.text for w in windows([document], 3, 8)] == [b"abcdefgh", b"jklmnopq", b"stuvwxyz"]


def test_docstrings_name_what_they_document() -> None:
    source = (
        b'"""Module."""\nclass A:\n    """About A."""\n    def f(self):\n        """About f."""\n    def g(self): ...\n'
    )
    assert list(docstrings(source)) == ["module\nModule.", "A\nAbout A.", "f\nAbout f."]
    assert list(docstrings(b"def broken(")) == []


def test_stdlib_documents_hold_sources_and_docstrings_but_no_tests(tmp_path: Path) -> None:
    (tmp_path / "json").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "json" / "decoder.py").write_text('"""Decodes."""\n')
    (tmp_path / "test" / "left_out.py").write_text("x = 1\n")
    assert stdlib_documents(tmp_path) == [
        Document("json/decoder.py", b'"""Decodes."""\n'),
        Document("json/decoder.py docstrings", b"module\nDecodes."),
    ]


def test_tar_pairs_text_and_json() -> None:
    with tarfile.open(fileobj=io.BytesIO(write_tar(SAMPLES))) as tar:
        members = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}  # type: ignore[union-attr]
    assert list(members) == ["000000.txt", "000000.json", "000001.txt", "000001.json"]
    assert members["000001.txt"] == SAMPLES[1].text
    assert json.loads(members["000001.json"]) == {"origin": "b.py@7", "bytes": len(SAMPLES[1].text)}


def test_mds_offsets_lead_to_every_column() -> None:
    data = write_mds(SAMPLES, mds_header("shard.00000.mds"))
    (count,) = struct.unpack_from("<I", data)
    offsets = struct.unpack_from(f"<{count + 1}I", data, 4)
    header = json.loads(data[4 * (count + 2) : offsets[0]])
    assert count == 2 and offsets[-1] == len(data)
    assert header["column_names"] == ["origin", "text"] and header["column_encodings"] == ["str", "bytes"]
    for sample, start, end in zip(SAMPLES, offsets, offsets[1:], strict=False):
        sizes = struct.unpack_from("<2I", data, start)
        assert data[start + 8 : end] == sample.name.encode() + sample.text
        assert sizes == (len(sample.name), len(sample.text))


def test_tokens_are_one_uint16_a_byte() -> None:
    data = write_tokens(SAMPLES)
    assert np.frombuffer(data, "<u2").tolist() == list(SAMPLES[0].text + SAMPLES[1].text)


TINY = replace(SMALL, samples=32, shards=2, length=64, batch_size=1, save_every=2, kill_at=3)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    make_shards(folder, TINY)
    return folder


def test_shards_of_all_formats_hold_the_same_number_of_samples(made: Path) -> None:
    files = make_shards(made, TINY)
    shards = [f for f in files if f.is_shard]
    assert [sum(f.key.startswith(name) for f in shards) for name in FORMATS] == [2, 2, 2]
    assert all(f.size == f.path.stat().st_size for f in files)
    index = json.loads((made / "mds" / "index.json").read_text())
    assert [(s["samples"], s["raw_data"]["bytes"]) for s in index["shards"]] == [
        (16, f.size) for f in shards if f.key.startswith("mds")
    ]
    assert sum(f.size for f in shards if f.key.startswith("tokens")) == 32 * 64 * 2


def test_shards_are_made_again_only_if_the_plan_changed(made: Path) -> None:
    stamp = (made / "made.json").stat().st_mtime_ns
    make_shards(made, replace(TINY, crop=3))
    assert (made / "made.json").stat().st_mtime_ns == stamp, "what is trained on is not what is written"


def test_the_loader_reads_what_the_demo_wrote(made: Path) -> None:
    tar = open_shard(made / "wds" / "text-00000.tar")
    mds = open_shard(made / "mds" / "shard.00001.mds")
    tokens = open_shard(made / "tokens" / "train-00001.bin", format=formats.Tokens(length=64))
    assert len(tar) == len(mds) == len(tokens) == 16
    assert len(tar[15]["txt"].tobytes().decode()) <= 64 == len(tar[15]["txt"])
    assert json.loads(tar[15]["json"].tobytes())["bytes"] == 64
    assert len(mds[0]["text"]) == 64 and "@" in mds[0]["origin"]
    assert len(tokens[3]["tokens"]) == 64 and tokens[3]["tokens"].max() < 256


@pytest.mark.parametrize("plan", [FULL, SMALL])
def test_plans_fill_their_least_bytes(plan: Plan) -> None:
    """Tokens are two bytes, tar adds two headers a sample, MDS adds its sizes: at least 2 + 1 + 1 bytes a token."""
    assert plan.samples * plan.length * 4 >= plan.least_bytes
    assert plan.steps == 2 * plan.steps_per_epoch


@pytest.mark.parametrize("kill_at", [4, 3, 16])
def test_a_plan_kills_between_two_checkpoints_of_epoch_one(kill_at: int) -> None:
    with pytest.raises(ValueError, match="kill_at"):
        replace(SMALL, samples=32, batch_size=1, save_every=4, kill_at=kill_at)
