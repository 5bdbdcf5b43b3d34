"""Jobs of two torchrun agents, as on two nodes: names agreed through torchrun's own store, lanes kept over restarts."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from cachefs.testing.ports import free_ports
from loader import ShardDataset
from loader.testing import write_mds

PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
import loader

if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, out, steps, workers = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    data = loader.ShardDataset(folder, global_batch_size=16, ids=True, seed=3)
    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), out / "state.json"
    done = 0
    if saved.exists():
        state = json.loads(saved.read_text())
        data.load_state_dict(state["data"])
        done = state["step"]
    dist.barrier()
    batches = DataLoader(data.batched(), batch_size=None, num_workers=workers)
    with (out / f"{done}-{rank}.log").open("w") as log:
        for step, batch in zip(range(done, done + steps), batches):
            print(json.dumps([step, os.environ["GROUP_RANK"], batch["__id__"].tolist()]), file=log, flush=True)
    states = [None] * dist.get_world_size()
    dist.all_gather_object(states, data.state_after(batch))
    assert all(state == states[0] for state in states)
    if rank == 0:
        saved.write_text(json.dumps({"step": done + steps, "data": states[0]}))
    dist.destroy_process_group()
"""


def launch(folder: Path, out: Path, *, nodes: int, ranks: int, steps: int, workers: int) -> dict[str, Any]:
    """Run so many agents with so many ranks each, to their end; the state they leave."""
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "NEARFLASH", "MASTER", "SLURM"))}
    plain |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    how = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", str(nodes)]
    how += ["--nproc-per-node", str(ranks), "--rdzv-backend", "c10d", "--rdzv-id", f"job{steps}"]
    how += ["--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--local-addr", "127.0.0.1"]
    program = [str(out / "program.py"), str(folder), str(out), str(steps), str(workers)]
    agents = [
        subprocess.Popen([*how, *program], env=plain, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(nodes)
    ]
    try:
        said = [agent.communicate(timeout=150)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait(30)
    assert [agent.returncode for agent in agents] == [0] * nodes, said
    state: dict[str, Any] = json.loads((out / "state.json").read_text())["data"]
    return state


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("workers", [0, 2])
def test_two_nodes_then_one(tmp_path: Path, workers: int) -> None:
    folder, out = tmp_path / "data", tmp_path / "out"
    write_mds(folder, [3] * 48)
    out.mkdir()
    (out / "program.py").write_text(PROGRAM)
    first = launch(folder, out, nodes=2, ranks=1, steps=5, workers=workers)
    host = socket.gethostname()
    assert first["nodes"] == [host, f"{host}#2"] and first["lanes"] == 8
    second = launch(folder, out, nodes=1, ranks=1, steps=4, workers=workers)
    assert second["lanes"] == 8

    steps: dict[int, list[int]] = defaultdict(list)
    shards: dict[str, set[int]] = defaultdict(set)
    for log in out.glob("*.log"):
        for step, node, ids in map(json.loads, log.read_text().splitlines()):
            steps[step] += ids
            if step < 5:
                shards[node] |= {i >> 32 for i in ids}
    alone = ShardDataset(folder, global_batch_size=16, ids=True, seed=3, lanes=8)
    whole = [sorted(batch["__id__"].tolist()) for batch in alone.batched()]
    assert [sorted(steps[step]) for step in range(9)] == whole
    assert len(set(chain(*whole))) == 144
    assert not shards["0"] & shards["1"]
