"""Warm reading with other tools. Runs as a script in their environment; imports nothing of this repository.

    python warm.py JOB ARGUMENTS...     prints {"seconds": ..., "cpu": ..., "work": ...} as its last line

Each job reads an epoch through the tool's usual loader, in batches, shuffled. The clock starts at the second batch, so
start-up does not count; ``work`` is the samples after the first batch. Data in a tool's own format is made from the
bench's own files at first use and kept.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

LONG_ENOUGH = 5.0
"""Seconds after which a pass is cut short: its rate is known by then."""


def same(batch: Any) -> Any:
    """A collate function that leaves samples as they are."""
    return batch


def clocked(loader: Iterable[Any], count: Callable[[Any], int]) -> dict[str, float]:
    """One pass over a loader, or its first seconds: time, CPU (workers included) and samples, after the first batch."""
    iterator = iter(loader)
    next(iterator)
    start, cpu, work = time.perf_counter(), _cpu(), 0
    for batch in iterator:
        work += count(batch)
        if time.perf_counter() - start > LONG_ENOUGH:
            break
    seconds = time.perf_counter() - start
    del iterator  # workers end, so that their CPU time counts
    return {"seconds": seconds, "cpu": _cpu() - cpu, "work": work}


def _cpu() -> float:
    own, children = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def _once(folder: Path, make: Callable[[Path], None]) -> Path:
    """``folder``, made by ``make`` unless an earlier call has."""
    if not folder.exists():
        unfinished = folder.with_name(f"{folder.name}.{os.getpid()}")
        make(unfinished)
        _rewrite(unfinished)
        unfinished.rename(folder)
    return folder


def _rewrite(folder: Path) -> None:
    """Write all files again in steps of megabytes, as all data of the bench is (``bench.data`` says why)."""
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        fresh = path.with_name(f"{path.name}.fresh")
        with open(path, "rb") as old, open(fresh, "wb", buffering=0) as new:
            shutil.copyfileobj(old, new, 8 << 20)
        fresh.replace(path)


def _rows(raw: str, length: str) -> Any:
    np = importlib.import_module("numpy")
    return np.memmap(raw, np.uint16, "r").reshape(-1, int(length))


def litdata_tokens(raw: str, length: str, batch: str, workers: str) -> dict[str, float]:
    """LitData: token chunks through TokensLoader and its own DataLoader."""
    lit = importlib.import_module("litdata")
    writer = importlib.import_module("litdata.streaming.writer")
    torch = importlib.import_module("torch")
    rows = _rows(raw, length)

    def make(folder: Path) -> None:
        folder.mkdir()
        out = writer.BinaryWriter(str(folder), chunk_bytes=64 << 20, item_loader=lit.TokensLoader())
        for i, row in enumerate(rows):
            out[i] = torch.from_numpy(row.copy())
        out.done()
        out.merge(1)

    folder = _once(Path(raw).with_suffix(".litdata"), make)
    data = lit.StreamingDataset(str(folder), shuffle=True, item_loader=lit.TokensLoader(block_size=int(length)))
    return clocked(lit.StreamingDataLoader(data, batch_size=int(batch), num_workers=int(workers)), len)


def streaming_tokens(raw: str, length: str, batch: str, workers: str) -> dict[str, float]:
    """Mosaic Streaming: MDS with a fixed array column."""
    streaming = importlib.import_module("streaming")
    loading = importlib.import_module("torch.utils.data")

    def make(folder: Path) -> None:
        columns = {"tokens": f"ndarray:uint16:{length}"}
        with streaming.MDSWriter(out=str(folder), columns=columns, size_limit=64 << 20) as out:
            for row in _rows(raw, length):
                out.write({"tokens": row})

    folder = _once(Path(raw).with_suffix(".mds"), make)
    data = streaming.StreamingDataset(local=str(folder), shuffle=True, batch_size=int(batch))
    loader = loading.DataLoader(data, batch_size=int(batch), num_workers=int(workers))
    return clocked(loader, lambda b: len(b["tokens"]))


def webdataset_samples(folder: str, batch: str, workers: str, use: str) -> dict[str, float]:
    """WebDataset: the same tar shards, shuffled in a buffer of 1000 as its documentation shows."""
    wds = importlib.import_module("webdataset")
    loading = importlib.import_module("torch.utils.data")
    shards = sorted(str(p) for p in Path(folder).glob("*.tar"))
    data = wds.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000)
    loader = loading.DataLoader(data, batch_size=int(batch), num_workers=int(workers), collate_fn=same)
    return clocked(loader, USES[use])


def litdata_samples(folder: str, batch: str, workers: str, use: str) -> dict[str, float]:
    """LitData: the payloads of the tar shards as ``bytes`` in chunks that its ``optimize`` wrote."""
    lit = importlib.import_module("litdata")
    source = Path(folder)

    def make(out: Path) -> None:
        lit.optimize(
            fn=tar_samples,
            inputs=sorted(str(p) for p in source.glob("*.tar")),
            output_dir=str(out),
            chunk_bytes="64MB",
            num_workers=1,
        )

    data = lit.StreamingDataset(str(_once(source.with_name("samples-litdata"), make)), shuffle=True)
    loader = lit.StreamingDataLoader(data, batch_size=int(batch), num_workers=int(workers), collate_fn=same)
    return clocked(loader, USES[use])


def tar_samples(path: str) -> Iterator[dict[str, Any]]:
    """The samples of one of the bench's tar shards: a ``bin`` and then its ``cls``."""
    with tarfile.open(path) as tar:
        payload = b""
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            if member.name.endswith(".bin"):
                payload = content.read()
            else:
                yield {"bin": payload, "cls": int(content.read())}


def copied(samples: list[Any]) -> int:
    """Every payload copied into one buffer, as a decoder would read it."""
    np = importlib.import_module("numpy")
    for sample in samples:
        payload = np.frombuffer(sample["bin"], np.uint8)
        np.copyto(_room(len(payload)), payload)
    return len(samples)


def _room(size: int) -> Any:
    """The first bytes of one buffer."""
    if not ROOM or len(ROOM[0]) < size:
        ROOM[:] = [importlib.import_module("numpy").empty(2 * size, "uint8")]
    return ROOM[0][:size]


ROOM: list[Any] = []
USES: dict[str, Callable[[Any], int]] = {"counted": len, "copied": copied}
"""What is done with a batch."""

JOBS: dict[str, Callable[..., dict[str, float]]] = {
    "litdata_tokens": litdata_tokens,
    "streaming_tokens": streaming_tokens,
    "webdataset_samples": webdataset_samples,
    "litdata_samples": litdata_samples,
}


if __name__ == "__main__":
    print(json.dumps(JOBS[sys.argv[1]](*sys.argv[2:])))
