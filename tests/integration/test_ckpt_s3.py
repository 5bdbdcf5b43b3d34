"""The store on a real S3 server, and on one that keeps odd keys as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cachefs.config import Origin
from cachefs.errors import CheckpointConflict, CheckpointNotFound, Denied, NearflashError
from cachefs.objstore.blocking import BlockingStore
from ckptstore import CheckpointStore, SaveOptions


def state(step: int) -> dict[str, Any]:
    return {"w": torch.full((1000, 300), float(step)), "b": torch.arange(7.0), "step": step}


@pytest.mark.s3
def test_save_and_load(seaweed: Any, s3_bucket: str) -> None:
    url = f"s3://{s3_bucket}/runs/a"
    options = SaveOptions(chunk_bytes=1 << 18, segment_bytes=1 << 20)
    with CheckpointStore(url, origin=seaweed.origin, save_options=options) as store:
        first = store.save_async(1, state(1))
        store.save(2, state(2))
        assert first.done() and store.latest() == 2 and store.steps() == [1, 2]
        assert store.verify(1) == [] and store.verify(2) == []
        target = torch.zeros(1000, 300)
        found = store.load({"w": target}, step=1)
        assert torch.equal(target, state(1)["w"]) and found["step"] == 1
        with pytest.raises(CheckpointConflict):
            store.save(2, state(3))
        with pytest.raises(CheckpointNotFound, match=r"no step 9.*2, 1"):
            store.load(step=9)


@pytest.mark.s3
def test_the_older_of_two_attempts_commits_nothing_that_counts(seaweed: Any, s3_bucket: str) -> None:
    url = f"s3://{s3_bucket}/run"
    with CheckpointStore(url, origin=seaweed.origin) as old, CheckpointStore(url, origin=seaweed.origin) as new:
        old.save(1, state(1))
        assert new.resume_or_init(state(0)) is not None
        late = old.save_async(2, state(-2))
        new.save(2, state(2))
        with pytest.raises(CheckpointConflict, match="lost the store"):
            late.result(60)
        assert new.steps() == [1, 2] and new.load()["w"][0, 0].item() == 2
        with pytest.raises(CheckpointConflict):
            old.save(3, state(-3))
        assert new.latest() == 2


@pytest.mark.s3
def test_the_command_line_in_a_bare_shell(seaweed: Any, s3_bucket: str, tmp_path: Path) -> None:
    url = f"s3://{s3_bucket}/run"
    with CheckpointStore(url, origin=seaweed.origin) as store:
        store.save(3, state(3))
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "NEARFLASH_"))},
        "AWS_ENDPOINT_URL": seaweed.endpoint,
        "AWS_ACCESS_KEY_ID": seaweed.access_key,
        "AWS_SECRET_ACCESS_KEY": seaweed.secret_key,
        "AWS_REGION": "us-east-1",
        "RANK": "3",
        "WORLD_SIZE": "4",
    }

    def run(*argv: str, **changed: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "ckptstore", *argv],
            cwd=tmp_path,
            env={**env, **changed},
            capture_output=True,
            text=True,
            timeout=100,
        )

    done = run("restore", url, "out")
    assert done.returncode == 0, done.stderr
    with CheckpointStore(tmp_path / "out") as store:
        assert torch.equal(store.load()["w"], state(3)["w"]) and store.verify() == []
    for argv, words, changed in (
        (("ls", f"s3://{s3_bucket}/nope"), "no checkpoint", {}),
        (("ls", "s3://no-such-bucket-here/x"), "no-such-bucket-here", {}),
        (("verify", url, "--step", "4"), "there are 3", {}),
        (("ls", url), "", {"AWS_SECRET_ACCESS_KEY": "wrong"}),
    ):
        failed = run(*argv, **changed)
        assert failed.returncode == 1 and failed.stderr.count("\n") == 1, failed
        assert failed.stderr.startswith("ckptstore: ") and words in failed.stderr
        assert seaweed.secret_key not in failed.stderr


@pytest.mark.s3
def test_a_program_that_ends_without_waiting_finishes_its_save(seaweed: Any, s3_bucket: str) -> None:
    script = """
import sys, torch
from cachefs.config import Origin
from ckptstore import CheckpointStore
origin = Origin(endpoint=sys.argv[2], region="us-east-1", access_key_id=sys.argv[3], secret_access_key=sys.argv[4])
CheckpointStore(sys.argv[1], origin=origin).save_async(1, {"x": torch.ones(1 << 22)})
"""
    url = f"s3://{s3_bucket}/run"
    argv = [url, seaweed.endpoint, seaweed.access_key, seaweed.secret_key]
    done = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "failed" not in done.stderr
    with CheckpointStore(url, origin=seaweed.origin) as store:
        assert store.latest() == 1 and store.verify() == []


@pytest.mark.s3
def test_wrong_credentials_are_one_clear_error(seaweed: Any, s3_bucket: str) -> None:
    origin = Origin(endpoint=seaweed.endpoint, region="us-east-1", access_key_id="nobody", secret_access_key="nothing")
    with CheckpointStore(f"s3://{s3_bucket}/run", origin=origin) as store:
        with pytest.raises(Denied):
            store.latest()
        with pytest.raises(Denied):
            store.save(1, state(1))


@pytest.mark.s3
@pytest.mark.parametrize("prefix", ["run[1]/a+b c/%41/é", "", "trailing/", "double//slash", "a b?c#d"])
def test_odd_prefixes(moto: Any, prefix: str) -> None:
    bucket = moto.make_bucket(f"my.ckpt.bucket{abs(hash(prefix)) % 10**6}")
    url = f"s3://{bucket}/{prefix}"
    with CheckpointStore(url, origin=moto.origin) as store:
        store.save(1, state(1))
        store.save(2, state(2))
        assert store.latest() == 2 and store.steps() == [1, 2] and store.verify() == []
        assert store.load()["w"][0, 0].item() == 2
    with BlockingStore(f"s3://{bucket}/", moto.origin) as raw:
        keys = [item.key for page in raw.list("") for item in page.objects]
    wanted = prefix if not prefix or prefix.endswith("/") else f"{prefix}/"
    assert len(keys) > 5 and all(key.startswith(wanted) for key in keys)


def test_memory() -> None:
    with CheckpointStore("memory://somewhere/run") as store:
        store.save(1, state(1))
        assert store.load()["step"] == 1


def test_a_scheme_that_nobody_knows() -> None:
    with pytest.raises(NearflashError, match="nonsense"):
        CheckpointStore("nonsense://bucket/x").save(1, {})
