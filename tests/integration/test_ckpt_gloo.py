"""Real processes under torch.distributed (gloo): saved by two ranks, loaded by one process, by two and by four."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from cachefs.testing.ports import free_ports

PROGRAM = '''
import os, signal, sys, traceback
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
import ckptstore
from cachefs.errors import NearflashError
from ckptstore import Timeouts

GRID = torch.arange(15.0).reshape(5, 3)
ROW = torch.arange(3.0).reshape(1, 3)

def spread(tensor, axis):
    if world == 1:
        return tensor.clone()
    return distribute_tensor(tensor.clone(), mesh, [Replicate() if axis is None else Shard(axis)])

def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

def model_and_optimizer(sharded):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 2))
    if sharded and world > 1:
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

def tables(axes):
    return {f"grid{i}": spread(GRID, axis) for i, axis in enumerate(axes)} | {"row": spread(ROW, axes[0])}

def save():
    model, optimizer = model_and_optimizer(True)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    ddp = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    ddp(torch.randn(8, 2, generator=torch.Generator().manual_seed(rank)))  # makes the running means differ
    torch.manual_seed(100 + rank)
    state = {"fsdp": model, "optimizer": optimizer, "ddp": ddp, "tables": tables([0, 1, None]),
             "rng": ckptstore.RngState(), "step": 5}
    with ckptstore.CheckpointStore(url) as store:
        saving = store.save_async(5, state)
        beat = torch.ones(1)
        while True:  # the job's own collectives go on meanwhile; all ranks leave in the same round
            dist.all_reduce(beat)
            flag = torch.tensor([float(saving.done())])
            dist.all_reduce(flag)
            if flag.item() > 0:
                break
        print(saving.result(60))
        assert store.latest() == 5 and store.steps() == [5]
    expected = {n: whole(p.detach()) for n, p in model.named_parameters()}
    moments = [whole(s["exp_avg"]) for s in optimizer.state.values()]
    mean = ddp.module[1].running_mean.clone()
    dist.broadcast(mean, 0)
    if rank == 0:
        torch.save((expected, moments, mean), side)

def load():
    expected, moments, mean = torch.load(side)
    model, optimizer = model_and_optimizer(True)
    for p in model.parameters():
        p.data.zero_() if world == 1 else p.data._local_tensor.zero_()
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    target = {"fsdp": model, "optimizer": optimizer, "ddp": plain, "tables": tables([1, 0, 0]),
              "rng": ckptstore.RngState()}
    for name, tensor in target["tables"].items():
        tensor.zero_() if world == 1 else tensor._local_tensor.zero_()
    with ckptstore.CheckpointStore(url) as store:
        found = store.load(target)
    for name, parameter in model.named_parameters():
        assert torch.equal(whole(parameter.detach()), expected[name]), name
    states = list(optimizer.state.values())
    assert len(states) == 4
    for state, moment in zip(states, moments, strict=True):
        assert torch.equal(whole(state["exp_avg"]), moment)
        assert state["step"].shape == () and state["step"].item() == 1
        if world > 1:
            assert isinstance(state["exp_avg"], DTensor)
    for i in range(3):
        assert torch.equal(whole(found["tables"][f"grid{i}"]), GRID), i
    assert torch.equal(whole(found["tables"]["row"]), ROW)
    assert torch.equal(plain[1].running_mean, mean)
    assert found["step"] == 5
    torch.manual_seed(100 + rank % 2)
    wanted = torch.rand(3)
    with ckptstore.CheckpointStore(url) as store:
        store.load({"rng": ckptstore.RngState()}, only="rng")
    assert torch.equal(torch.rand(3), wanted)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()

def lonely():
    """Rank 1 never takes part; the others must hear of it, and go on."""
    with ckptstore.CheckpointStore(url, timeouts=Timeouts(rank=5.0)) as store:
        if rank != 1:
            try:
                store.save(7, {"x": torch.ones(1)})
                raise AssertionError("saved without rank 1")
            except NearflashError as e:
                assert "rank 1 of 2 not heard of" in str(e), e
        dist.barrier()
        store.save(8, {"x": torch.ones(1)})
        assert store.steps() == [5, 8]

def run_rank(action, port):
    """One forked rank, from start to end."""
    global mesh
    signal.alarm(100)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    if world > 1:
        os.environ["WORLD_SIZE"] = str(world)
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (world,))
    {"save": save, "load": load, "lonely": lonely}[action]()
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()

torch.set_num_threads(1)
url, side = sys.argv[1:3]
for job in sys.argv[3:]:  # imported once, then forked for every rank of every job
    count, action, port = job.split(":")
    world, children = int(count), []
    for rank in range(world):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_rank(action, port)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    print("job", count, action, "ok" if not any(codes) else codes, flush=True)
'''

JOBS = ["2 save", "1 load", "2 load", "4 load", "2 lonely"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Job -> ``ok``, or everything that was printed. All jobs share one store, in this order."""
    folder = tmp_path_factory.mktemp("gloo")
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "NEARFLASH", "MASTER"))}
    jobs = [f"{job.replace(' ', ':')}:{port}" for job, port in zip(JOBS, free_ports(len(JOBS)), strict=True)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder / "run"), str(folder / "expected.pt"), *jobs],
        env={**plain, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    return {job: "ok" if f"job {job} ok" in done.stdout else done.stdout for job in JOBS}


@pytest.mark.xdist_group("ckpt-gloo")
@pytest.mark.timeout(450)
@pytest.mark.parametrize("job", JOBS)
def test_ranks_as_processes(job: str, outcomes: dict[str, str]) -> None:
    assert outcomes[job] == "ok"
