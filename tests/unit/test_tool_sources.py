"""Commands and their sources: damage that an index would hide, and an output that would be its own source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from loader.testing import write_mds, write_tars
from loader.tool.cli import main


@pytest.fixture
def tars(tmp_path: Path) -> Path:
    write_tars(tmp_path / "tars", [3, 4])
    return tmp_path / "tars"


@pytest.fixture
def mds(tmp_path: Path) -> Path:
    write_mds(tmp_path / "mds", [3, 4])
    return tmp_path / "mds"


def inspected(capsys: pytest.CaptureFixture[str], source: Path) -> Any:
    assert main(["inspect", str(source), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_inspect_shows_damage_where_an_index_tells_the_counts(capsys: pytest.CaptureFixture[str], mds: Path) -> None:
    assert main(["inspect", str(mds)]) == 0 and "check reads all samples" in capsys.readouterr().out
    index = json.loads((mds / "index.json").read_text())
    name = index["shards"][0]["raw_data"]["basename"]
    raw = (mds / name).read_bytes()
    (mds / name).write_bytes(b"\xff" * 8 + raw[8:])
    found = inspected(capsys, mds)
    assert any(name in text and "cannot be read" in text for text in found["odd"])
    assert found["fields"]["id"]["of"] == 4


def test_inspect_shows_other_counts_than_an_index_tells(capsys: pytest.CaptureFixture[str], mds: Path) -> None:
    index = json.loads((mds / "index.json").read_text())
    index["shards"][1]["samples"] = 3
    (mds / "index.json").write_text(json.dumps(index))
    assert any("holds 4 samples, the index beside it says 3" in text for text in inspected(capsys, mds)["odd"])


def test_convert_does_not_write_over_its_source_by_another_name(
    capsys: pytest.CaptureFixture[str], tars: Path, tmp_path: Path
) -> None:
    (tmp_path / "link").symlink_to(tars)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "0.tar").symlink_to(tars / "000.tar")
    for source, out in ((tars, tmp_path / "link"), (tmp_path / "link", tars), (tmp_path / "links", tars)):
        assert main(["convert", str(source), str(out), "--to", "wds", "--force"]) == 1
        assert "the folder of the source" in capsys.readouterr().err
