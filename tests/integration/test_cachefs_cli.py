"""The ``cachefs`` command as a person meets it: output, exit codes, one line per error."""

from __future__ import annotations

import io
import json
import os
import pty
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cachefs.cli import main
from cachefs.client import connect
from cachefs.config import MIB, Settings
from cachefs.objstore import BlockingStore
from cachefs.testing.node import Node, node, wait_until
from cachefs.testing.s3proxy import CountingProxy
from cachefs.testing.seaweed import SeaweedServer

OBJECTS = {"d/a.bin": 2 * MIB + 3, "d/b.bin": 1000, "d/e/c.bin": 1, "top": 500}


@dataclass
class Done:
    """What a command printed."""

    stdout: str
    stderr: str


def cachefs(*args: str, env: dict[str, str], code: int = 0) -> Done:
    """Run the command in this process, with these environment variables and no others of ours."""
    out, err = io.StringIO(), io.StringIO()
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(env)
    try:
        with redirect_stdout(out), redirect_stderr(err):
            got = main(args)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return checked(Done(out.getvalue(), err.getvalue()), got, code)


def cachefs_process(*args: str, env: dict[str, str] | None = None, code: int = 0) -> Done:
    """Run the command as a process."""
    command = [sys.executable, "-m", "cachefs", *args]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=90, check=False)
    return checked(Done(done.stdout, done.stderr), done.returncode, code)


def checked(done: Done, got: int, code: int) -> Done:
    assert got == code, done
    assert "Traceback" not in done.stderr
    if code:
        assert done.stderr.count("\n") == 1, done.stderr
        assert done.stderr.startswith("cachefs: ")
    return done


@pytest.fixture
def bucket(seaweed: SeaweedServer, s3_bucket: str) -> str:
    with BlockingStore(f"s3://{s3_bucket}", seaweed.origin) as store:
        for key, size in OBJECTS.items():
            store.put(key, random.Random(key).randbytes(size))
    return s3_bucket


@pytest.fixture
def here(tmp_path: Path, seaweed: SeaweedServer) -> Iterator[Node]:
    with node(tmp_path, seaweed.origin) as n:
        yield n


@pytest.mark.s3
def test_warm_ls_stat_status_evict_stop_with_json(here: Node, bucket: str) -> None:
    env = here.environment()
    assert json.loads(cachefs("status", "--json", env=env).stdout)["running"] is False
    done = json.loads(cachefs("warm", "--json", f"s3://{bucket}/d/", f"s3://{bucket}/top", env=env).stdout)
    assert done == {"objects": 4, "bytes": sum(OBJECTS.values()), "failed": 0}
    listed = json.loads(cachefs("ls", "--json", "-r", f"s3://{bucket}/", env=env).stdout)
    assert {item["url"].removeprefix(f"s3://{bucket}/"): item["cached_bytes"] for item in listed} == OBJECTS
    assert json.loads(cachefs("stat", "--json", f"s3://{bucket}/top", env=env).stdout)["cached_bytes"] == 500
    held = json.loads(cachefs("ls", "--json", env=env).stdout)
    assert {e["url"].removeprefix(f"s3://{bucket}/"): e["cached_bytes"] for e in held} == OBJECTS
    assert [e["size"] for e in held] == [OBJECTS[k] for k in sorted(OBJECTS)]
    lines = [line.split() for line in cachefs("ls", env=env).stdout.splitlines()]
    assert lines == [[str(OBJECTS[k]), "100%", f"s3://{bucket}/{k}"] for k in sorted(OBJECTS)]
    status = json.loads(cachefs("status", "--json", env=env).stdout)
    assert (status["running"], status["entries"], status["fills"]) == (True, 4, 4)
    gone = json.loads(cachefs("evict", "--json", f"s3://{bucket}/d/*.bin", env=env).stdout)
    assert (gone["entries"], gone["busy"]) == (2, 0)
    assert json.loads(cachefs("evict", "--json", "--all", env=env).stdout)["entries"] == 2
    assert json.loads(cachefs("stop", "--json", env=env).stdout) == {"stopped": True}
    wait_until(lambda: not here.daemon_runs)
    assert json.loads(cachefs("stop", "--json", env=env).stdout) == {"stopped": False}


@pytest.mark.s3
def test_output_for_people(here: Node, bucket: str) -> None:
    env = here.environment()
    assert "objects  2" in cachefs("warm", f"s3://{bucket}/d/*.bin", env=env).stdout
    lines = cachefs("ls", f"s3://{bucket}/d", env=env).stdout.splitlines()
    assert [line.split() for line in lines] == [
        [str(2 * MIB + 3), "100%", f"s3://{bucket}/d/a.bin"],
        ["1000", "100%", f"s3://{bucket}/d/b.bin"],
        [f"s3://{bucket}/d/e/"],
    ]
    [line] = cachefs("ls", f"s3://{bucket}/top", env=env).stdout.splitlines()
    assert line.split() == ["500", "0%", f"s3://{bucket}/top"]
    for missing in (f"s3://{bucket}/nope", f"s3://{bucket}/nope/"):
        assert missing in cachefs("ls", missing, env=env, code=1).stderr
    text = cachefs("status", env=env).stdout
    assert "running" in text
    assert "MiB" in text


@pytest.mark.s3
def test_warm_shows_a_bar_on_a_terminal(here: Node, bucket: str) -> None:
    main, side = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cachefs", "warm", f"s3://{bucket}/d/"],
        env={**here.environment(), "TERM": "xterm", "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        stderr=side,
    )
    os.close(side)
    shown = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # the other side is closed
            break
        if not part:
            break
        shown += part
    os.close(main)
    assert process.wait(60) == 0
    assert process.stdout is not None
    process.stdout.close()
    assert b"warming" in shown


@pytest.mark.s3
def test_errors_are_one_line_and_name_the_thing(here: Node, bucket: str, tmp_path: Path) -> None:
    env = here.environment()
    assert "absent" in cachefs_process("warm", f"s3://{bucket}/absent", env=env, code=1).stderr
    assert "is a prefix (a directory)" in cachefs("warm", f"s3://{bucket}/d", env=env, code=1).stderr
    assert "no object is there" in cachefs("warm", f"s3://{bucket}/nothing-*", env=env, code=1).stderr
    assert "no-such-bucket" in cachefs("stat", "s3://no-such-bucket-at-all/k", env=env, code=1).stderr
    wrong = {**env, "AWS_SECRET_ACCESS_KEY": "wrong"}
    denied = cachefs("warm", f"s3://{bucket}/top", env=wrong, code=1).stderr
    assert f"s3://{bucket}/top" in denied
    assert env["AWS_SECRET_ACCESS_KEY"] not in denied
    assert "local path" in cachefs("warm", str(tmp_path), env=env, code=1).stderr
    assert "quota='lots' cannot be read" in cachefs("daemon", "--quota", "lots", env=env, code=1).stderr
    assert "Missing argument" in cachefs("warm", env=env, code=2).stderr
    assert "No such command" in cachefs("wram", env=env, code=2).stderr
    assert "give URLs to drop, or --all" in cachefs("evict", env=env, code=1).stderr
    nowhere = {**env, "AWS_ENDPOINT_URL": "http://127.0.0.1:9", "NEARFLASH_REQUEST_DEADLINE": "2"}
    del nowhere["NEARFLASH_SOCKET"]
    with_own = {
        **nowhere,
        "NEARFLASH_CACHE_DIR": str(tmp_path / "other"),
        "XDG_RUNTIME_DIR": str(here.settings.socket.parent),
    }
    assert "s3://bucket/k: the connection failed" in cachefs("stat", "s3://bucket/k", env=with_own, code=1).stderr
    cachefs("stop", env=with_own)


@pytest.mark.s3
def test_an_entry_in_use_stays_and_makes_evict_fail(here: Node, bucket: str) -> None:
    with here.client() as client, client.open(f"s3://{bucket}/top") as shard:
        shard.wait(0, shard.size)
        done = cachefs("evict", f"s3://{bucket}/top", env=here.environment(), code=1)
        assert "1 entries are in use and stay" in done.stderr


@pytest.mark.s3
def test_more_than_the_quota_is_refused_before_anything_is_fetched(
    tmp_path: Path, seaweed: SeaweedServer, bucket: str
) -> None:
    with (
        CountingProxy(seaweed.endpoint) as proxy,
        node(tmp_path, replace(seaweed.origin, endpoint=proxy.endpoint), quota=MIB) as small,
    ):
        done = cachefs("warm", f"s3://{bucket}/d/", env=small.environment(), code=1)
        assert f"do not fit into the quota of {MIB} bytes (raise the quota or warm fewer)" in done.stderr
        assert not [r for r in proxy.requests if r.method == "GET" and r.key.startswith("d/")]


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own that is soon full."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount: {mounted.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.s3
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_a_full_cache_disk_fails_warm_and_lets_open_pass_through(
    tmp_path: Path, seaweed: SeaweedServer, bucket: str
) -> None:
    with small_disk(tmp_path / "disk", "1m") as disk, node(disk, seaweed.origin, quota=100 * MIB) as full:
        done = cachefs_process("warm", f"s3://{bucket}/d/a.bin", f"s3://{bucket}/top", env=full.environment(), code=1)
        assert f"s3://{bucket}/d/a.bin: could not be cached" in done.stderr
        with full.client() as client:
            with client.open(f"s3://{bucket}/d/a.bin") as shard:
                assert bytes(shard.view()) == random.Random("d/a.bin").randbytes(OBJECTS["d/a.bin"])
                assert not shard.cached
            with client.open(f"s3://{bucket}/top") as shard:
                assert bytes(shard.view()) == random.Random("top").randbytes(500)
                assert shard.cached, "small ones still fit"


@pytest.mark.s3
def test_daemon_command_leaves_a_daemon_that_does_not_end_when_idle(here: Node) -> None:
    env = {k: v for k, v in here.environment().items() if k != "NEARFLASH_IDLE_TIMEOUT"}
    first = json.loads(cachefs("daemon", "--json", "--quota", "7MiB", env=env).stdout)
    assert first["quota_bytes"] == 7 * MIB
    assert first["pid"] == here.daemon_pid
    assert first["already_running"] is False
    again = json.loads(cachefs("daemon", "--json", env=env).stdout)
    assert (again["pid"], again["already_running"]) == (first["pid"], True)
    text = cachefs("daemon", "--quota", "7MiB", "--idle-timeout", "0", env=env).stdout
    assert text.startswith(f"already running, pid {first['pid']}\n")
    for options, name in (("--quota", "8MiB"), "quota_bytes"), (("--idle-timeout", "5"), "idle_timeout_seconds"):
        failed = cachefs("daemon", *options, env=env, code=1).stderr
        assert f"a daemon serves already, pid {first['pid']}; its {name} cannot be changed (cachefs stop" in failed
    assert f"pid {first['pid']}" in cachefs_process("daemon", "--foreground", env=env, code=1).stderr
    cachefs("stop", env=env)
    wait_until(lambda: not here.daemon_runs)


def test_foreground_daemon_logs_to_standard_error_and_ends_on_sigterm(tmp_path: Path) -> None:
    from cachefs.config import Origin

    with node(tmp_path, Origin()) as here:
        process = subprocess.Popen(
            [sys.executable, "-m", "cachefs", "daemon", "--foreground"],
            env=here.environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert json.loads(process.stderr.readline())["event"] == "started"
        process.terminate()
        assert process.wait(15) == 0
        events = [json.loads(line)["event"] for line in process.stderr]
        assert events == ["stopping", "stopped"]
        process.stderr.close()


def test_help_is_quick_and_importing_cachefs_loads_nothing_heavy() -> None:
    code = (
        "import sys, time; t = time.process_time(); import cachefs; s = time.process_time() - t;"
        "heavy = {'torch', 'pyarrow', 'obstore', 'numpy', 'asyncio', 'rich', 'click'} & set(sys.modules);"
        "print(s, sorted(heavy))"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(3)]
    assert min(float(r.stdout.split()[0]) for r in runs) < 0.05
    assert all(r.stdout.split(maxsplit=1)[1].strip() == "[]" for r in runs)
    code = (
        "import sys; from cachefs.cli import main; main(['--help']);"
        "print(sorted({'torch', 'obstore', 'asyncio', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "warm" in done.stdout


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    for i in range(3000):
        (tmp_path / f"{i:05d}").touch()
    done = subprocess.run(
        f"{sys.executable} -m cachefs ls {tmp_path} | head -1", shell=True, capture_output=True, text=True, check=False
    )
    assert done.stdout.split()[-1].endswith("/00000")
    assert done.stderr == ""


def test_settings_pass_from_client_to_daemon_unchanged(tmp_path: Path) -> None:
    from cachefs.config import Origin
    from cachefs.launch import daemon_environment

    with node(tmp_path, Origin(secret_access_key="hush"), free_floor=12345, origin_parallel=3) as here:
        env = daemon_environment(here.settings, {"HOME": "/nonexistent", "NEARFLASH_CONFIG": "relative.toml"})
        assert "hush" not in repr(env)
        loaded = Settings.load(env)
        assert loaded == here.settings.with_(origin=loaded.origin, autostart=loaded.autostart)
        with connect(here.settings) as client:
            began = time.monotonic()
            assert client.stats()["quota_bytes"] == here.settings.quota
            assert time.monotonic() - began < 30
