"""A mixture of remote data sets through a node's daemon."""

from __future__ import annotations

from pathlib import Path

from torch.utils.data import DataLoader

from cachefs.client import connect
from cachefs.testing.scripted import ScriptedStore
from cachefs.testing.served import served
from loader import Mixture, ShardDataset
from loader.formats import Tokens
from loader.testing import write_tars, write_tokens


def test_sources_are_read_through_the_cache_and_declared_in_one_plan(tmp_path: Path) -> None:
    write_tars(tmp_path / "tars", [6, 5, 7])
    objects = {f"tars/{path.name}": path.read_bytes() for path in (tmp_path / "tars").iterdir()}
    for number in range(6):
        write_tokens(tmp_path / "tokens" / f"{number}.bin", 320)
        objects[f"tokens/{number}.bin"] = (tmp_path / "tokens" / f"{number}.bin").read_bytes()
    store = ScriptedStore(objects)
    with served(tmp_path, store) as server, connect(server.settings) as client:

        def mix(root: str) -> Mixture:
            own = [
                ShardDataset(f"{root}tars/", batch_size=1, lanes=2, fields=["cls"], client=client),
                ShardDataset(f"{root}tokens/", batch_size=1, lanes=2, format=Tokens(length=16), client=client),
            ]
            return Mixture(own, weights=[1, 2], global_batch_size=6, ids=True)

        remote, local = mix("s3://bucket/"), mix(f"{tmp_path}/")
        for _ in range(2):
            found = [(sample["__source__"], sample["__id__"]) for sample in remote]
            assert found == [(sample["__source__"], sample["__id__"]) for sample in local]
            assert client.stats()["plans"] == 1
        both = DataLoader(remote, batch_size=6, num_workers=2, collate_fn=list)
        assert sum(map(len, both)) == len(local)
