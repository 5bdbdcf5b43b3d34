"""Jobs under torchrun: killed at any moment, restarted by torchrun itself, and started again with other world sizes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import chain
from pathlib import Path

import pytest

from cachefs.testing.ports import free_ports
from loader import ShardDataset
from loader.testing import write_tars

PROGRAM = """
import json, os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
import loader

torch.set_num_threads(1)
folder, out, steps, dies = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
data = loader.ShardDataset(folder, global_batch_size=12, ids=True, seed=3)
dist.init_process_group("gloo")
rank, saved = dist.get_rank(), out / "state.json"
state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "data": None}
if state["data"] is not None:
    data.load_state_dict(state["data"])
step, attempt = state["step"], os.environ["TORCHELASTIC_RESTART_COUNT"]
batches = loader.Loader(data, threads=1)
with (out / f"{os.environ['TORCHELASTIC_RUN_ID']}-{attempt}-{rank}.log").open("w") as log:
    while step < steps:
        for batch in batches:
            if step == dies and attempt == "0" and rank == 1:
                os._exit(1)
            print(json.dumps([step, batch["__id__"].tolist()]), file=log, flush=True)
            step += 1
            dist.barrier()  # where gradients would be reduced
            if rank == 0:
                whole = {"step": step, "data": batches.state_dict()}
                (out / "new.json").write_text(json.dumps(whole))
                (out / "new.json").rename(saved)
            if step == steps:
                break
            time.sleep(0.02)
dist.destroy_process_group()
"""
STEPS = 30


class Job:
    """Training that goes on in one folder, over all its launches."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = folder, out
        self.launches = 0
        (out / "program.py").write_text(PROGRAM)

    def launch(self, ranks: int, *, steps: int = STEPS, restarts: int = 0, dies: int = -1) -> subprocess.Popen[str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "NEARFLASH", "MASTER"))}
        plain |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        self.launches += 1
        how = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--nnodes", "1"]
        how += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts), "--rdzv-backend", "c10d"]
        how += ["--rdzv-endpoint", f"127.0.0.1:{free_ports(1)[0]}", "--rdzv-id", f"launch{self.launches}"]
        return subprocess.Popen(
            [*how, str(self.out / "program.py"), str(self.folder), str(self.out), str(steps), str(dies)],
            env=plain,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def step(self) -> int:
        saved = self.out / "state.json"
        return int(json.loads(saved.read_text())["step"]) if saved.exists() else 0

    def kill_after(self, running: subprocess.Popen[str], step: int) -> None:
        """Kill the launcher, then all ranks, once that step has been saved."""
        deadline = time.monotonic() + 100
        while self.step() < step and running.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(running.pid, signal.SIGKILL)
        for rank in self.ranks():
            os.kill(rank, signal.SIGKILL)
        running.communicate(timeout=30)

    def ranks(self) -> list[int]:
        """The processes of this job that are left: torchrun gives each rank a session of its own."""
        found = []
        for process in Path("/proc").iterdir():
            try:
                arguments = (process / "cmdline").read_bytes().split(b"\0") if process.name.isdigit() else []
            except OSError:
                continue  # it has ended meanwhile
            if str(self.out / "program.py").encode() in arguments:
                found.append(int(process.name))
        return found

    def batches(self) -> dict[int, list[int]]:
        """Step -> the global batch of the attempt that came last to it, all of whose ranks used their parts."""
        steps: dict[int, dict[str, list[list[int]]]] = defaultdict(lambda: defaultdict(list))
        for log in sorted(self.out.glob("launch*.log")):
            for line in log.read_text().splitlines():
                step, ids = json.loads(line)
                steps[step][log.stem.rpartition("-")[0]].append(ids)
        return {step: sorted(chain(*attempts[max(attempts)])) for step, attempts in sorted(steps.items())}


def uninterrupted(folder: Path) -> dict[int, list[int]]:
    ds = ShardDataset(folder, global_batch_size=12, ids=True, seed=3)
    batches = [sorted(batch["__id__"].tolist()) for _ in range(4) for batch in ds.batched()]
    return dict(enumerate(batches[:STEPS]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [17, 25, 30, 23, 19])  # 9 batches and 6 samples
    return folder


def finish(running: subprocess.Popen[str]) -> None:
    said, _ = running.communicate(timeout=100)
    assert running.returncode == 0, said


@pytest.mark.timeout(240)
def test_killed_and_started_again_with_fewer_ranks(folder: Path, tmp_path: Path) -> None:
    job = Job(folder, tmp_path)
    job.kill_after(job.launch(2), 4)
    assert 4 <= job.step() < STEPS
    finish(job.launch(1))
    assert job.batches() == uninterrupted(folder)


@pytest.mark.slow
@pytest.mark.timeout(480)
def test_restarted_by_torchrun_and_killed_with_three_and_four_ranks(folder: Path, tmp_path: Path) -> None:
    job = Job(folder, tmp_path)
    job.kill_after(job.launch(3), 3)
    finish(job.launch(2, steps=14, restarts=1, dies=10))  # a rank dies in its tenth step: torchrun restarts both
    job.kill_after(job.launch(4), 18)
    finish(job.launch(3))
    assert job.batches() == uninterrupted(folder)
    assert len(list(tmp_path.glob("launch2-1-*.log"))) == 2
