"""Every page of the bench runs from end to end, on sizes that measure nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import peers
from bench.__main__ import main
from bench.data import kept, tar_shards
from bench.sizes import QUICK


@pytest.mark.s3
@pytest.mark.timeout(300)
def test_all_pages_in_one_quick_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(peers, "_has", lambda interpreter, module: False)  # they have a test of their own
    assert main(["--quick", "--repeats", "1", "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "bench.json").read_text())
    assert [f["name"] for f in found["figures"]] == [
        "cold",
        "warm-tokens",
        "warm-samples",
        "warm-tables-parquet",
        "warm-tables-arrow",
        "index",
        "filling",
    ]
    for figure in found["figures"]:
        rows = {row["case"]: row for row in figure["rows"]}
        assert rows[figure["baseline"]]["ratio"]["median"] == 1.0
        assert all(row["rate"]["low"] > 0 for row in rows.values())
        assert {row["role"] for row in rows.values()} >= {"limit", "ours"}
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert f"Cold fill, {QUICK.cold_objects * QUICK.cold_object / 1e6:.0f} MB" in shown
    assert not (tmp_path / "data" / "cache").exists(), "the cache of the cold page is removed"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("tool", ["webdataset", "litdata"])
def test_a_peer_reads_the_samples_of_the_tars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str) -> None:
    pytest.importorskip(tool)
    monkeypatch.delenv("NEARFLASH_BENCH_PYTHON", raising=False)
    folder = kept(tmp_path / "samples", QUICK, tar_shards)
    (case,), skipped = peers.cases([peers.Peer(tool, tool, f"{tool}_samples", (str(folder), "16", "0", "copied"))])
    assert not skipped
    assert case.run().work == QUICK.tar_samples - 16


def test_an_unknown_page_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refusal:
        main(["lukewarm"])
    assert refusal.value.code == 2
    assert "no page 'lukewarm'" in capsys.readouterr().err
