"""The ``ckptstore`` command: listing, showing, verifying, bringing home; one-line errors, exit codes, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckptstore import CheckpointStore, SaveOptions, Sharded
from ckptstore.cli import main
from ckptstore.storage_posix import PosixStorage
from ckptstore.testing.job import run_job, values


class Ran:
    """What a command did."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    def command(*argv: str | Path) -> Ran:
        code = main([str(a) for a in argv])
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        if code:
            assert err.startswith("ckptstore: ") and err.count("\n") == 1
        else:
            assert err == ""
        return Ran(code, out, err)

    return command


MODEL = {"embed": torch.arange(60.0).reshape(20, 3), "norm.weight": torch.ones(3, dtype=torch.bfloat16)}


def saved(root: Path, steps: tuple[int, ...] = (10, 20)) -> Path:
    """A store that three ranks saved into: a sharded tensor, a tie, values of each rank's own."""

    def work(store: CheckpointStore, rank: int) -> None:
        for step in steps:
            rows = MODEL["embed"][rank * 7 : (rank + 1) * 7]
            state = {
                "model": {
                    "embed": Sharded(rows, (20, 3), (rank * 7, 0)),
                    "norm.weight": MODEL["norm.weight"],
                    "tied": MODEL["norm.weight"],
                },
                "rng": torch.full((2,), rank),
                "step": step,
                "seed": rank,
                "empty": torch.empty(0, 3),
                "lr": 0.5,
            }
            store.save(step, state, per_rank=["rng", "seed"])

    options = SaveOptions(chunk_bytes=24, segment_bytes=80)
    values(run_job(3, work, lambda rank: PosixStorage(str(root)), save_options=options))
    return root


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("cli") / "run")


def test_ls(run: Any, root: Path) -> None:
    lines = run("ls", root).out.splitlines()
    assert [line.split()[:2] for line in lines] == [["STEP", "GENERATION"], ["10", "1"], ["20", "1"]]
    rows = json.loads(run("ls", root, "--json").out)
    assert [(r["step"], r["world_size"], r["tensors"], r["live"]) for r in rows] == [(10, 3, 5, True), (20, 3, 5, True)]
    assert [r["latest"] for r in rows] == [False, True]
    assert [line.endswith("  (latest)") for line in lines] == [False, False, True]


def test_show(run: Any, root: Path) -> None:
    text = run("show", root).out
    assert "20x3" in text and "model/tied  = model/norm.weight" in text and "rng  of rank 2" in text
    assert 'seed = {"$ranks"' in text and "lr = 0.5" in text
    found = json.loads(run("show", root, "--step", "10", "--json").out)
    assert found["values"]["step"] == 10
    by_name = {(t["name"], t["rank"]): t for t in found["tensors"]}
    assert by_name["model/embed", None]["bytes"] == 240
    assert by_name["model/norm.weight", None]["dtype"] == "bfloat16"
    assert ("rng", 1) in by_name


def test_verify(run: Any, root: Path) -> None:
    both = "step 10 (generation 1): sound\nstep 20 (generation 1): sound\n"
    assert run("verify", root).out == both + "2 steps checked, every digest\n"
    assert run("verify", root, "--quick").out == both + "2 steps checked, manifests and sizes\n"
    assert run("verify", root, "--latest").out == "step 20 (generation 1): sound\n1 step checked, every digest\n"
    assert json.loads(run("verify", root, "--step", "10", "--json").out) == [
        {"step": 10, "generation": 1, "damages": []}
    ]


def test_verify_names_the_damage(run: Any, tmp_path: Path) -> None:
    root = saved(tmp_path / "run")
    folder = root / "step-000000000020-g000001"
    segment = next(p for p in sorted(folder.glob("*-r00001-*.safetensors")))
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    ran = run("verify", root)
    assert ran.code == 1 and "step 20 (generation 1): damaged" in ran.out and "2 steps checked" in ran.out
    assert "damaged: step 20 of 2 checked" in ran.err
    assert segment.name in ran.out and "model/embed" in ran.out and "digest" in ran.out
    damages = json.loads(run("verify", root, "--json").out)[1]["damages"]
    assert [d["tensor"] for d in damages] == ["model/embed"]
    assert run("verify", root, "--step", "10").code == 0
    ran = run("restore", root, tmp_path / "out")
    assert ran.code == 1 and "digest of tensor 'model/embed'" in ran.err and segment.name in ran.err
    assert not list((tmp_path / "out").glob("step-*"))
    assert run("restore", root, tmp_path / "out", "--step", "10").code == 0
    (folder / "manifest.json").write_bytes(b"{}")
    assert "damaged" in run("ls", root).out
    assert [row["latest"] for row in json.loads(run("ls", root, "--json").out)] == [True, False]


def test_an_older_step_may_be_the_damaged_one(run: Any, tmp_path: Path) -> None:
    root = saved(tmp_path / "run")
    segment = next(iter((root / "step-000000000010-g000001").glob("*.safetensors")))
    segment.write_bytes(segment.read_bytes()[:-1])
    ran = run("verify", root)
    assert ran.code == 1 and "damaged: step 10 of 2 checked" in ran.err
    assert run("verify", root, "--latest").code == 0


def test_restore_makes_a_store_of_its_own(run: Any, root: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    assert "step 10: 5 tensors" in run("restore", root, out, "--step", "10").out
    assert run("verify", out).code == 0
    found: dict[str, Any] = json.loads(run("show", out, "--json").out)
    original: dict[str, Any] = json.loads(run("show", root, "--step", "10", "--json").out)
    for key in ("step", "world_size", "values"):
        assert found[key] == original[key]
    drop = ("chunks",)
    assert [{k: v for k, v in t.items() if k not in drop} for t in found["tensors"]] == [
        {k: v for k, v in t.items() if k not in drop} for t in original["tensors"]
    ]
    with CheckpointStore(out) as store:
        state = store.load()
        assert torch.equal(state["model"]["embed"], MODEL["embed"])
        assert torch.equal(state["model"]["tied"], MODEL["norm.weight"])
        store.save(11, state)  # and it goes on from there
        assert store.steps() == [10, 11]
    again = run("restore", root, out, "--step", "20")
    assert again.code == 1 and "nothing is overwritten" in again.err


def test_restore_brings_a_part(run: Any, root: Path, tmp_path: Path) -> None:
    value = json.loads(run("restore", root, tmp_path / "a", "--only", "model/tied", "--only", "rng", "--json").out)
    assert value["step"] == 20 and value["tensors"] == 2
    with CheckpointStore(tmp_path / "a") as store:
        state = store.load()
    assert state.keys() == {"model", "rng"} and state["model"].keys() == {"tied"}
    assert torch.equal(state["model"]["tied"], MODEL["norm.weight"])
    ran = run("restore", root, tmp_path / "b", "--only", "modle")
    assert ran.code == 1 and "names nothing" in ran.err and "model, rng" in ran.err
    assert run("verify", tmp_path / "a").code == 0


def test_a_restored_module_is_read_by_the_safetensors_library(run: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = nn.Linear(3, 2)
    with CheckpointStore(tmp_path / "run") as store:
        store.save(1, {"model": model})
    run("restore", tmp_path / "run", tmp_path / "out", "--only", "model")
    (segment,) = (tmp_path / "out").rglob("*.safetensors")
    assert torch.equal(load_file(segment)["model/weight"], model.weight)


def test_what_is_not_there_is_one_line_with_what_is(run: Any, root: Path, tmp_path: Path) -> None:
    for command in ("show", "verify"):
        ran = run(command, root, "--step", "15")
        assert ran.code == 1 and "no step 15" in ran.err and "20, 10" in ran.err
    assert "20, 10" in run("restore", root, tmp_path / "x", "--step", "15").err
    assert not (tmp_path / "x").exists()
    for command in ("ls", "show", "verify"):
        ran = run(command, tmp_path / "nowhere")
        assert ran.code == 1 and "no such folder" in ran.err
    (tmp_path / "empty").mkdir()
    assert "empty" in run("ls", tmp_path / "empty").err


def test_a_target_in_use_is_left_alone(run: Any, root: Path, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    (tmp_path / "file").write_text("keep")
    assert "'mine'" in run("restore", root, tmp_path / "full").err
    assert "a file" in run("restore", root, tmp_path / "file").err
    assert run("restore", root, "s3://bucket/x").code == 1
    assert (tmp_path / "full" / "mine").read_text() == "keep"


def test_wrong_usage(run: Any, root: Path) -> None:
    assert run("verify", root, "--step", "-1").code == 2
    assert run("verify", root, "--latest", "--step", "1").code == 2
    assert run("nonsense").code == 2
    assert "--help" in run("ls").err


def test_abandoned_timelines_are_listed_when_asked_for(run: Any, tmp_path: Path) -> None:
    with CheckpointStore(tmp_path) as store:
        store.save(1, {})
        store.save(2, {})
    with CheckpointStore(tmp_path) as store:
        store.load(step=1)
        store.save(3, {})
    assert [r["step"] for r in json.loads(run("ls", tmp_path, "--json").out)] == [1, 3]
    rows = json.loads(run("ls", tmp_path, "--all", "--json").out)
    assert [(r["step"], r["live"]) for r in rows] == [(1, True), (2, False), (3, True)]
    assert "(abandoned)" in run("ls", tmp_path, "--all").out


def test_a_bare_shell_is_enough(root: Path, tmp_path: Path) -> None:
    """No torch, no process group, and rank variables of a job that is long gone."""
    script = (
        "import sys; from ckptstore.cli import main; code = main(sys.argv[1:]); "
        "print('torch' in sys.modules); sys.exit(code)"
    )
    env = {**os.environ, "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "10.255.255.1", "MASTER_PORT": "1"}
    for argv in (["restore", str(root), "out"], ["verify", "out"], ["show", "out"], ["ls", "out"], ["--help"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.endswith("False\n")
    done = subprocess.run(
        [sys.executable, "-m", "ckptstore", "ls", "nowhere"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1


def test_importing_the_package_is_light() -> None:
    script = "import sys, ckptstore; print(sorted({'torch', 'numpy', 'obstore', 'click'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
