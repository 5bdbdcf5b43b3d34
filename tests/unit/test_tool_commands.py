"""``python -m loader``: what each command prints, its JSON, its exit codes and its one-line errors."""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from loader.testing import tar_bytes, write_mds, write_tars, write_tokens
from loader.tool.cli import cli, main


@dataclass
class Ran:
    """What a command printed."""

    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Ran]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def command(*argv: str | Path, code: int = 0) -> Ran:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            got = main([str(arg) for arg in argv])
        out, err = capsys.readouterr()
        assert got == code, out + err
        assert "Traceback" not in err
        if code:
            assert err.startswith("python -m loader: ") and err.count("\n") == 1, err
        else:
            assert err == ""
        return Ran(out, err)

    return command


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    write_tars(tmp_path / "tars", [3, 4])
    return tmp_path / "tars"


@pytest.fixture
def mds(tmp_path: Path) -> Path:
    write_mds(tmp_path / "mds", [3, 4])
    return tmp_path / "mds"


def broken(tars: Path) -> Path:
    """A third shard in which one sample is damaged, and a fourth that is cut off."""
    members = [("a.txt", b"one"), ("b.txt", b"two"), ("b.txt", b"again"), ("c.txt", b"\xff\xfe"), ("d.txt", b"four")]
    (tars / "002.tar").write_bytes(tar_bytes(members))
    (tars / "003.tar").write_bytes(tar_bytes([("e.txt", bytes(3000))])[:2000])
    return tars


def test_help_names_every_command() -> None:
    done = CliRunner().invoke(cli, ["--help"])
    assert done.exit_code == 0
    assert all(name in done.output for name in ("inspect", "head", "count", "check", "convert"))


def test_count(run: Run, tars: Path, mds: Path) -> None:
    assert run("count", tars).out == "7\n"
    assert run("count", tars, "--json").json == {
        "url": str(tars),
        "format": "webdataset",
        "shards": 2,
        "samples": 7,
        "counted_by": "reading the shards",
    }
    assert run("count", mds, "--json").json["counted_by"] == "an index beside the shards"
    assert run("count", mds / "shard.00001.mds").out == "4\n"


def test_count_believes_an_index_unless_told_to_walk(run: Run, mds: Path) -> None:
    index = json.loads((mds / "index.json").read_text())
    index["shards"][0]["samples"] = 30
    (mds / "index.json").write_text(json.dumps(index))
    assert run("count", mds).out == "34\n"
    assert run("count", "--walk", mds).out == "7\n"


def test_count_of_a_damaged_shard_is_an_error(run: Run, tars: Path) -> None:
    assert "003.tar at byte 0: the tar is cut off" in run("count", broken(tars), code=1).err


def test_tokens_need_their_format(run: Run, tmp_path: Path) -> None:
    write_tokens(tmp_path / "a.bin", 1000)
    said = run("count", tmp_path / "a.bin", code=1).err
    assert "no known format" in said and "need --format tokens --length 2048 --dtype uint16" in said
    assert "needs --length" in run("count", tmp_path / "a.bin", "--format", "tokens", code=2).err
    assert "give --format" in run("count", tmp_path / "a.bin", "--length", "10", code=2).err
    assert run("count", tmp_path / "a.bin", "--format", "tokens", "--length", "10").out == "100\n"
    options = ("--format", "tokens", "--length", "10", "--dtype", "uint32", "--stride", "5", "--labels")
    assert run("count", tmp_path / "a.bin", *options).out == "98\n"
    options = ("--format", "tokens", "--length", "10", "--dtype", "float32")
    assert "no integer dtype" in run("count", tmp_path, *options, code=2).err


def test_options_of_formats(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes([("k.seg.txt", b"x")]))
    shown = run("head", tmp_path / "a.tar", "--format", "tar", "-O", "split=last", "--json").json
    assert shown == {"__key__": "k.seg", "txt": "x"}
    assert "has no option 'splits'" in run("head", tmp_path, "--format", "wds", "-O", "splits=last", code=2).err
    assert "is not NAME=VALUE" in run("head", tmp_path, "--format", "wds", "-O", "split", code=2).err
    assert "'all'" in run("head", tmp_path, "--format", "wds", "-O", "split=all", code=2).err
    assert "is not known" in run("head", tmp_path, "--format", "hdf5", code=2).err
    assert ", tokens (try" in run("head", tmp_path, "--format", "Tokens", code=2).err


def test_the_formats_that_are_listed_are_those_there_are() -> None:
    from loader.formats.registry import BY_NAME, KINDS
    from loader.tool.options import FORMATS

    assert set(FORMATS) == {*BY_NAME, *KINDS} and FORMATS[-1] == "tokens"
    shown = " ".join(CliRunner().invoke(cli, ["head", "--help"]).output.split())
    assert ", ".join(FORMATS) in shown


def png(width: int, height: int) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "PNG")
    return out.getvalue()


def test_images_are_shown_by_size_and_mode(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes([("k.png", png(7, 5))]))
    assert "image 7x5 RGB" in run("head", tmp_path / "a.tar", "--decode", "pil").out
    shown = run("head", tmp_path / "a.tar", "--decode", "pil", "--json").json["png"]
    assert (shown["image"], shown["mode"]) == ([7, 5], "RGB")


def test_a_folder_of_images_is_told_its_format(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(7, 5))
    said = run("head", tmp_path, code=1).err
    assert "looks like an image (png)" in said and "--format files makes every file a sample" in said
    assert "image 7x5" in run("head", tmp_path, "--format", "files", "--decode", "pil").out


def test_head_for_people(run: Run, tmp_path: Path) -> None:
    members = [("k.jpg", b"\xff\xd8\xff\xe0rest"), ("k.txt", b"hi \x1b[31m"), ("k.json", b'{"a": [1, 2]}')]
    (tmp_path / "a.tar").write_bytes(tar_bytes(members))
    lines = run("head", tmp_path / "a.tar").out.splitlines()
    assert lines[0] == f"sample 0  (sample 0 of {tmp_path}/a.tar)"
    assert [line.split(maxsplit=1) for line in lines[1:]] == [
        ["__key__", "'k'"],
        ["jpg", "8 bytes, jpeg"],
        ["txt", "'hi \\x1b[31m'"],
        ["json", '{"a": [1, 2]}'],
    ]


def test_head_as_json(run: Run, mds: Path, tmp_path: Path) -> None:
    lines = [json.loads(line) for line in run("head", mds, "-n", "4", "--json", "--fields", "blob").out.splitlines()]
    assert [line["blob"]["sha256"] for line in lines] == [
        hashlib.sha256(f"blob {i}".encode()).hexdigest() for i in range(4)
    ]
    assert run("head", mds, "-n", "1", "--json", "--base64", "--fields", "blob").json["blob"]["base64"] == "YmxvYiAw"
    assert "needs --json" in run("head", mds, "--base64", code=2).err
    assert run("head", mds, "-n", "0").out == ""
    write_tokens(tmp_path / "t.bin", 100)
    shown = run("head", tmp_path / "t.bin", "-n", "1", "--format", "tokens", "--length", "10", "--json").json["tokens"]
    assert (shown["dtype"], shown["shape"], shown["first"]) == ("uint16", [10], list(range(8)))


def test_head_says_which_fields_there_are(run: Run, mds: Path) -> None:
    assert "fields present: blob, id" in run("head", mds, "--fields", "nope", code=1).err
    assert "empty name" in run("head", mds, "--fields", "a,,b", code=2).err


def test_a_pickle_is_shown_as_bytes_and_never_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes([("k.pkl", b"\x80\x04N."), ("k.cls", b"3")]))
    shown = run("head", tmp_path / "a.tar", "--json").json
    assert (shown["cls"], shown["pkl"]["kind"]) == (3, "pickle")
    assert run("check", tmp_path / "a.tar", "--json").json["damaged"] == 0


def test_inspect(run: Run, mds: Path, tars: Path) -> None:
    found = run("inspect", mds, "--json").json
    assert found["fields"] == {
        "id": {"types": ["int"], "in": 7, "of": 7},
        "blob": {"types": ["bytes (text)"], "in": 7, "of": 7},
    }
    names = ("format", "shards", "samples", "index", "odd", "skipped_entries", "damaged_shards")
    assert [found[name] for name in names] == ["mds", 2, 7, True, [], 0, 0]
    assert [row["samples"] for row in found["shard_table"]] == [3, 4]
    text = run("inspect", mds, "--shards", "1").out
    assert "an index beside the shards" in text and "and 1 more" in text
    assert run("inspect", tars, "--json").json["index"] is False


def test_inspect_shows_what_is_odd(run: Run, tars: Path) -> None:
    (tars / "004.tar").write_bytes(tar_bytes([("README", b"no key"), ("x.txt", b"no end")])[:2048])
    found = run("inspect", broken(tars), "--json").json
    assert (found["samples"], found["damaged_shards"], found["skipped_entries"]) == (7 + 4 + 1, 1, 1)
    assert any("003.tar at byte 0: the tar is cut off" in text for text in found["odd"])
    assert any("004.tar: the tar has no end marker" in text for text in found["odd"])
    assert any("repeats a field" in text for text in found["odd"])
    assert found["fields"]["txt"]["in"] < found["fields"]["txt"]["of"]
    assert "(damaged)" in run("inspect", tars).out


def test_check_of_sound_data(run: Run, mds: Path, tars: Path) -> None:
    for folder in (mds, tars):
        found = run("check", folder, "--json", "--workers", "2").json
        assert (found["samples"], found["damaged"], found["damages"]) == (7, 0, [])
    assert "damaged         0" in run("check", tars).out


def test_check_lists_damage_with_offsets(run: Run, tars: Path) -> None:
    ran = run("check", broken(tars), "--json", code=1)
    found = [(Path(d["url"]).name, d["sample"], d["offset"]) for d in ran.json["damages"]]
    assert found == [("002.tar", 1, 2048), ("002.tar", 2, None), ("003.tar", None, 0)]
    assert "3 damages in 2 of 4 shards" in ran.err
    assert ran.json["samples"] == 11
    text = run("check", tars, "--most", "1", code=1).out
    assert "002.tar sample 1 at byte 2048: member 'b.txt' repeats a field" in text and "and 2 more" in text
    (tars / "002.tar").unlink()
    assert "1 damage in 1 of 3 shards" in run("check", tars, code=1).err
    broken(tars)
    undecoded = run("check", tars, "--decode", "bytes", "--json", code=1).json
    assert undecoded["damaged"] == 2


def test_check_compares_an_index_with_its_shards(run: Run, mds: Path) -> None:
    index = json.loads((mds / "index.json").read_text())
    for shard in index["shards"]:
        raw = (mds / shard["raw_data"]["basename"]).read_bytes()
        shard["raw_data"]["hashes"] = {"sha1": hashlib.sha1(raw).hexdigest()}
    index["shards"][1]["samples"] = 5
    (mds / "index.json").write_text(json.dumps(index))
    path = mds / "shard.00000.mds"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1  # in a value: no structure tells
    path.write_bytes(raw)
    found = run("check", mds, "--json", code=1).json
    assert found["digests"] == 2
    assert [(Path(d["url"]).name, d["what"]) for d in found["damages"]] == [
        ("shard.00000.mds", "its bytes do not have the sha1 that the index beside it gives"),
        ("shard.00001.mds", "holds 4 samples, the index beside it says 5"),
    ]


def test_convert_reports_and_refuses(run: Run, tars: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("convert", tars, out, "--to", "mds", "--json").json
    assert (done["samples"], done["shards"], done["lost"]) == (7, 1, 0)
    assert done["columns"] == {"__key__": "str", "bin": "bytes", "cls": "int"}
    assert run("check", out, "--json").json["digests"] == 1
    assert "not empty" in run("convert", tars, out, "--to", "mds", code=1).err
    assert "which no conversion of this kind wrote" in run("convert", tars, out, "--to", "wds", "--force", code=1).err
    assert "the folder of the source" in run("convert", out, out, "--to", "mds", "--force", code=1).err
    run("convert", tars, out, "--to", "mds", "--force", "--fields", "cls", "--limit", "2")
    assert run("head", out, "--json").out.splitlines() == ['{"cls": 0}', '{"cls": 1}']
    assert "is a file" in run("convert", tars, tars / "000.tar", "--to", "mds", code=1).err
    assert "is not a size" in run("convert", tars, tmp_path / "x", "--to", "mds", "--shard-size", "big", code=1).err
    assert "not FIELD=TYPE" in run("convert", tars, tmp_path / "x", "--to", "mds", "--column", "a", code=2).err
    assert "no field 'a'" in run("convert", tars, tmp_path / "x", "--to", "mds", "--column", "a=str", code=1).err
    assert (
        "not written with compression"
        in run("convert", tars, tmp_path / "x", "--to", "tokens", "--compression", "zstd", code=1).err
    )
    assert not (tmp_path / "x").exists()


def test_convert_to_tar_says_which_members_fields_became(run: Run, mds: Path, tmp_path: Path) -> None:
    done = run("convert", mds, tmp_path / "out", "--to", "wds")
    assert "  id: member 'id'\n" in done.out and "  blob: member 'blob'\n" in done.out
    (tmp_path / "rows.jsonl").write_text('{"text": "a", "n": 1.5, "note": "b"}\n')
    done = run("convert", tmp_path / "rows.jsonl", tmp_path / "rows", "--to", "wds", "--json")
    assert done.json["columns"] == {"text": "member 'text'", "n": "member 'n.json'", "note": "member 'note.txt'"}


def test_convert_meets_damage(run: Run, tars: Path, tmp_path: Path) -> None:
    broken(tars)
    source = [str(tars / name) for name in ("002.tar", "003.tar")]
    assert "repeats a field" in run("convert", source[0], tmp_path / "out", "--to", "wds", code=1).err
    assert not (tmp_path / "out").exists()  # no half shard, not even a folder
    (tars / "000.tar").unlink()
    (tars / "001.tar").unlink()
    done = run("convert", tars, tmp_path / "out", "--to", "wds", "--on-error", "skip", "--json").json
    assert (done["samples"], done["lost"]) == (3, 2)
    assert run("count", tmp_path / "out").out == "3\n"


def test_convert_to_tokens_and_back(run: Run, tmp_path: Path) -> None:
    ids = write_tokens(tmp_path / "in" / "a.bin", 1000)
    options = ("--format", "tokens", "--length", "100")
    done = run(
        "convert", tmp_path / "in", tmp_path / "out", "--to", "tokens", *options, "--shard-size", "500", "--json"
    )
    assert (done.json["shards"], done.json["samples"]) == (5, 10)
    assert done.json["notes"] == ["read it with --format tokens --length 100 --dtype uint16"]
    written = b"".join(path.read_bytes() for path in sorted((tmp_path / "out").iterdir()))
    assert np.array_equal(np.frombuffer(written, np.uint16), ids)
    failed = run(
        "convert", tmp_path / "in", tmp_path / "x", "--to", "tokens", *options, "--column", "tokens=uint8", code=1
    )
    assert "sample 2, field 'tokens': the id 256 does not fit into uint8" in failed.err
