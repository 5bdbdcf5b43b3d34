"""``python -m loader`` as a process: output, exit codes, a closed pipe, an interrupt, a kill, an object store."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import loader
from cachefs.objstore.blocking import BlockingStore
from cachefs.testing.node import Node, node, wait_until
from cachefs.testing.seaweed import SeaweedServer
from loader.testing import tar_bytes, write_mds, write_tars
from loader.writers.output import STAGE

COMMAND = [sys.executable, "-m", "loader"]


def tool(*argv: str | Path, env: dict[str, str] | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, *map(str, argv)], capture_output=True, text=True, env=env, timeout=90, check=False)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    return done


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough samples that a command is still at work when it is stopped."""
    folder = tmp_path_factory.mktemp("large")
    raw = tar_bytes([(f"{i:06d}.txt", b"x") for i in range(4000)])
    for shard in range(30):
        (folder / f"{shard:03d}.tar").write_bytes(raw)
    return folder


def test_the_command_as_a_process(tmp_path: Path) -> None:
    write_tars(tmp_path / "tars", [3, 4])
    assert tool("count", tmp_path / "tars").stdout == "7\n"
    assert tool("--version").stdout.startswith("python -m loader, version ")
    missing = tool("inspect", tmp_path / "no", code=1)
    assert missing.stdout == "" and missing.stderr == f"python -m loader: {tmp_path}/no: no such file\n"
    assert tool("count", code=2).stderr.count("\n") == 1
    tool("convert", tmp_path / "tars", tmp_path / "out", "--to", "mds")
    assert json.loads(tool("check", tmp_path / "out", "--json").stdout)["damaged"] == 0


def test_the_tool_is_light(tmp_path: Path) -> None:
    script = (
        "import sys; from loader.tool.cli import main; main(['--help']); "
        "print('heavy:', *sorted({'torch', 'pyarrow', 'zstandard', 'rich', 'obstore'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1].strip() == "heavy:"


def test_a_reader_that_has_seen_enough(large: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "head", str(large), "-n", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(60)
        assert process.stderr.read() == b""


def _heeds_interrupts() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background job is born with it ignored


@pytest.mark.parametrize("command", ["check", "convert"])
def test_an_interrupt_ends_it_at_once_and_leaves_nothing(command: str, large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = {"check": ["check", str(large)], "convert": ["convert", str(large), str(out), "--to", "mds"]}[command]
    with subprocess.Popen(
        [*COMMAND, *argv], stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=_heeds_interrupts
    ) as process:
        assert process.stderr is not None
        if command == "convert":
            wait_until(lambda: (out / STAGE).exists())
        else:  # at work, not at its imports: a shard is mapped
            wait_until(lambda: str(large) in Path(f"/proc/{process.pid}/maps").read_text())
        process.send_signal(signal.SIGINT)
        code = process.wait(20)
        error = process.stderr.read().decode()
    assert code == 130 and error.strip() == "python -m loader: interrupted", (code, error)
    assert not out.exists()


def test_a_kill_leaves_no_data_set_and_the_next_run_works(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with subprocess.Popen([*COMMAND, "convert", str(large), str(out), "--to", "wds", "--shard-size", "1MB"]) as process:
        wait_until(lambda: (out / STAGE / "shard-000001.tar").exists())
        process.kill()
    assert [path.name for path in out.iterdir()] == [STAGE]
    assert "no shard there" in tool("count", out, code=1).stderr
    tool("convert", large, out, "--to", "wds", "--limit", "10")
    assert [path.name for path in out.iterdir()] == ["shard-000000.tar"]


def test_progress_is_for_terminals_only(tmp_path: Path) -> None:
    write_tars(tmp_path / "tars", [30] * 3)
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "check", str(tmp_path / "tars")], stdout=subprocess.PIPE, stderr=theirs, timeout=60, check=True
    )
    os.close(theirs)
    seen = os.read(ours, 65536)
    os.close(ours)
    assert b"checking" in seen and b"checking" not in done.stdout
    assert b"\x1b" not in done.stdout


@pytest.fixture
def here(tmp_path: Path, seaweed: SeaweedServer) -> Iterator[Node]:
    with node(tmp_path, seaweed.origin) as n:
        yield n


@pytest.mark.s3
def test_data_in_an_object_store(here: Node, seaweed: SeaweedServer, s3_bucket: str, tmp_path: Path) -> None:
    env = here.environment()
    blobs = write_mds(tmp_path / "mds", [30, 50])
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store:
        for path in (tmp_path / "mds").iterdir():
            store.put(f"mds/{path.name}", path.read_bytes())
    source, out = f"s3://{s3_bucket}/mds/", f"s3://{s3_bucket}/out"
    assert json.loads(tool("inspect", source, "--json", env=env).stdout)["samples"] == 80
    done = tool("convert", source, out, "--to", "wds", "--shard-size", "20kB", "--json", env=env)
    assert json.loads(done.stdout)["shards"] > 1
    assert "not empty" in tool("convert", source, out, "--to", "wds", env=env, code=1).stderr
    assert tool("count", out, env=env).stdout == "80\n"
    tool("convert", out, tmp_path / "back", "--to", "mds", "--fields", "id,blob", env=env)
    back: list[Any] = [dict(s) for s in loader.ShardDataset(tmp_path / "back", batch_size=1, shuffle=False)]
    assert [(sample["id"], bytes(sample["blob"])) for sample in back] == list(enumerate(blobs))
    # a forced one replaces all there is; one that fails takes away what it put
    tool("convert", source, out, "--to", "wds", "--force", "--limit", "3", env=env)
    assert tool("count", out, env=env).stdout == "3\n"
    named = ("--to", "mds", "--column", "id=str_int", "--shard-size", "400")
    tool("convert", source, f"{out}2", *named, env=env)
    assert tool("check", f"{out}2", "--json", env=env).stdout.count('"damaged": 0') == 1
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store:
        store.put(
            "bad/a.tar", tar_bytes([(f"{i}.txt", b"x" * 90) for i in range(300)] + [("z.txt", b"x"), ("z.txt", b"y")])
        )
        assert any(page.objects for page in store.list("out2"))
        bad = ("convert", f"s3://{s3_bucket}/bad/a.tar", f"{out}3", "--to", "mds", "--shard-size", "400")
        assert "repeats a field" in tool(*bad, env=env, code=1).stderr
        assert not any(page.objects for page in store.list("out3"))
