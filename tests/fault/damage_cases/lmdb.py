"""LMDB has no checksums: a changed value is data. A changed page number, count or size must be found or harmless."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import loader
from tests.fault.format_damage import Case


def _written(records: list[tuple[bytes, bytes]], *, dupsort: bool = False, name: bytes | None = None) -> bytes:
    import lmdb

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.mdb")
        with lmdb.open(str(path), subdir=False, lock=False, map_size=1 << 24, max_dbs=2) as env:
            database = env.open_db(name, dupsort=dupsort)
            with env.begin(write=True, db=database) as transaction:
                for key, value in records:
                    transaction.put(key, value)
        return path.read_bytes()


def build(rng: random.Random) -> dict[str, bytes]:
    """Two leaves, a branch, overflow pages."""
    values = [rng.randbytes(rng.choice((0, 30, 400, 2100))) for _ in range(10)]
    return {"data.mdb": _written([(b"%04d" % i, value) for i, value in enumerate(values)])}


def build_pairs(rng: random.Random) -> dict[str, bytes]:
    records = [(b"num-samples", b"6")]
    records += [(b"image-%09d" % i, rng.randbytes(60)) for i in range(1, 7)]
    records += [(b"label-%09d" % i, b"word %d" % i) for i in range(1, 7)]
    return {"data.mdb": _written(records)}


def build_dups(rng: random.Random) -> dict[str, bytes]:
    """A sub-database in which a key has values on a small page, and another so many that they are a tree."""
    records = [(b"few", b"%02d" % i) for i in range(5)]
    records += [(b"many", rng.randbytes(100)) for _ in range(60)]
    records += [(b"one", b"value")]
    return {"data.mdb": _written(records, dupsort=True, name=b"inner")}


CASES = [
    Case("lmdb", build, loader.open_shard),
    Case("lmdb-pairs", build_pairs, loader.open_shard),
    Case("lmdb-dups", build_dups, loader.open_shard),
]
