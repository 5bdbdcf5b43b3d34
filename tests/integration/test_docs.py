"""Every page of the documentation runs as it is printed, against a real S3 server."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from minio import Minio

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))]
PREAMBLE = (Path(__file__).parent / "torchvision_preamble.py").read_text()
FENCE = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def page_script(text: str) -> str:
    """The page's blocks as one Python script: Python as it is, shell blocks through ``sh``.

    Blocks that begin with ``make`` are what runs this test, or the demo and bench; they are left out.
    """
    parts = [PREAMBLE if "import lightning" in text else "", "import subprocess, sys"]
    for language, body in FENCE.findall(text):
        if language == "python":
            parts.append(body)
        elif not body.startswith("make"):
            parts.append(f"sys.stdout.flush(); subprocess.run(['sh', '-euc', {body!r}], check=True)")
    return "\n".join(parts) + "\n"


def upload_training_data(client: Minio, bucket: str) -> None:
    def put(key: str, data: bytes) -> None:
        client.put_object(bucket, key, io.BytesIO(data), len(data))

    for shard in range(4):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w") as tar:
            for i in range(25):
                for suffix, data in (("txt", f"text {shard} {i}".encode()), ("cls", str(i % 3).encode())):
                    info = tarfile.TarInfo(f"{shard:03d}{i:03d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
        put(f"train-tar/part-{shard:03d}.tar", out.getvalue())
        tokens = np.arange(shard * 10_000, shard * 10_000 + 9_000, dtype=np.uint16)
        put(f"tokens/{shard:03d}.bin", tokens.tobytes())


@pytest.mark.s3
@pytest.mark.parametrize("page", PAGES)
def test_page_runs(page: str, seaweed: Any, tmp_path: Path) -> None:
    script = page_script((ROOT / page).read_text())
    if script.count("\n") < 3:
        pytest.skip("no code on this page")
    bucket = seaweed.make_bucket("docs")
    host = seaweed.endpoint.removeprefix("http://")
    client = Minio(host, access_key=seaweed.access_key, secret_key=seaweed.secret_key, secure=False)
    upload_training_data(client, bucket)
    (tmp_path / "page.py").write_text(script.replace("s3://bucket/", f"s3://{bucket}/"))
    env = {
        **{k: v for k, v in os.environ.items() if not k.startswith(("NEARFLASH_", "AWS_"))},
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "AWS_ENDPOINT_URL": seaweed.endpoint,
        "AWS_ACCESS_KEY_ID": seaweed.access_key,
        "AWS_SECRET_ACCESS_KEY": seaweed.secret_key,
        "AWS_REGION": "us-east-1",
        "NEARFLASH_CACHE_DIR": str(tmp_path / "cache"),
        "NEARFLASH_IDLE_TIMEOUT": "30",
        "NEARFLASH_QUOTA": "1GB",
    }
    try:
        done = subprocess.run(
            [sys.executable, "page.py"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=110
        )
    finally:
        subprocess.run([sys.executable, "-m", "cachefs", "stop"], env=env, capture_output=True, timeout=30)
    assert done.returncode == 0, done.stdout + done.stderr
