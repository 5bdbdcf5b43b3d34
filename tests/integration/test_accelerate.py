"""Hugging Face's accelerate in two processes: every sample once with ``loader.accelerate.prepare``, else an error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cachefs.testing.ports import free_ports
from loader import ShardDataset
from loader.testing import write_tars

WORLD = 2
PROGRAM = """
import json, os, signal, sys, traceback, warnings
from itertools import islice
from pathlib import Path
import torch
import torch.distributed as dist
from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader
import loader

warnings.simplefilter("ignore")
folder, out = Path(sys.argv[1]), Path(sys.argv[2])

def make(**options):
    return loader.ShardDataset(folder, **{"batch_size": 4, "ids": True, "seed": 1, **options})

def load(ds, workers=0, method=None):
    return DataLoader(ds, batch_size=4, collate_fn=loader.collate, num_workers=workers, multiprocessing_context=method)

SOURCES = {
    "data set": lambda ds: ds,
    "batches": lambda ds: ds.batched(),
    "Loader": loader.Loader,
    "Loader with a stage": lambda ds: loader.Loader(ds, stages=[loader.Map(lambda sample: sample)]),
    "DataLoader": load,
    "DataLoader with workers": lambda ds: load(ds, 2),
    "DataLoader of batches": lambda ds: DataLoader(ds.batched(), batch_size=None),
}

def ids(batches):
    return [batch["__id__"].tolist() for batch in batches]

def naive(say):
    for dispatch in (None, False):
        for split in (False, True):
            accelerator = Accelerator(
                cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch, split_batches=split)
            )
            for workers, method in ((0, None), (1, "fork")) + ((1, "spawn"),) * (dispatch is None and not split):
                for ds in (make(), make().batched()):
                    if not isinstance(ds, loader.ShardDataset) and split:
                        continue  # accelerate refuses that itself
                    batches = load(ds, workers, method) if isinstance(ds, loader.ShardDataset) else DataLoader(
                        ds, batch_size=None, num_workers=workers, multiprocessing_context=method)
                    try:
                        say(f"naive {dispatch} {split} {workers} {method}", ids(accelerator.prepare(batches)))
                    except loader.errors.ConfigError as e:
                        say(f"naive {dispatch} {split} {workers} {method}", str(e))
    whole = make(rank=0, world_size=1, drop_last=False)  # yields everything, so accelerate may divide it
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    batches = DataLoader(whole, batch_size=4, collate_fn=lambda samples: [sample["__id__"] for sample in samples])
    say("divided", list(accelerator.prepare(batches)))

def prepared(say):
    accelerator = Accelerator(cpu=True)
    for name, source in SOURCES.items():
        batches = loader.accelerate.prepare(accelerator, source(make()))
        assert isinstance(batches, DataLoader) and len(batches) == 3, batches
        assert accelerator.prepare(batches) is batches
        assert loader.accelerate.prepare(accelerator, batches) is batches
        passes = [ids(batches), ids(batches)]
        batches.set_epoch(1)
        passes.append(ids(batches))
        say(name, passes)
        batches.set_epoch(0)
        say(name + ", skipped", ids(skip_first_batches(batches, 1)))

def metrics(say):
    accelerator = Accelerator(cpu=True)
    for name, source in SOURCES.items():
        batches = loader.accelerate.prepare(accelerator, source(make(pad=True, drop_last=False)))
        say(name, [accelerator.gather_for_metrics(batch["__id__"]).tolist() for batch in batches])
        assert batches.end_of_dataloader

def states(say):
    accelerator = Accelerator(cpu=True)
    for number, (name, source) in enumerate(SOURCES.items()):
        accelerator._dataloaders.clear()
        seen, state = [], None
        for attempt in range(3):
            ds = make()
            batches = loader.accelerate.prepare(accelerator, source(ds))
            if attempt:
                accelerator.load_state(str(out / f"state-{number}"))
            taken = 0
            while taken < 2:
                for batch in batches:
                    seen.append(batch["__id__"].tolist())
                    taken += 1
                    if taken == 2:
                        assert batches.state_dict() == make().state_at(len(seen)), name
                        accelerator.save_state(str(out / f"state-{number}"))
                        accelerator.wait_for_everyone()
                        break
            accelerator._dataloaders.clear()
        say(name, seen)

def alone(say):
    # one process, where dividing does no harm; accelerate counts epochs from 0 whatever was loaded
    for dispatch in (None, False):
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        for workers in (0, 1):
            ds = make()
            # the dispatcher takes nothing but tensors
            batches = accelerator.prepare(DataLoader(ds, batch_size=4, num_workers=workers, collate_fn=lambda samples: {
                "__id__": torch.tensor([sample["__id__"] for sample in samples])}))
            ds.load_state_dict(ds.state_at(2 * 7 + 3))
            passes = [ids(batches), ids(batches)]
            batches.set_epoch(1)
            say(f"{dispatch} {workers}", [*passes, ids(batches), ids(batches)])

def counted(say):
    # a data set that is counted while it is read: what a resumed pass or spawned workers count is not known here
    many = out / "many"
    accelerator = Accelerator(cpu=True)
    def gathered(batches):
        return [accelerator.gather_for_metrics(batch["__id__"]).tolist() for batch in batches]
    def of(source):
        return loader.accelerate.prepare(accelerator, source)
    def more(**options):
        return loader.ShardDataset(many, batch_size=4, ids=True, seed=1, pad=True, **options)
    begun = of(more())
    first = gathered(islice(begun, 20))
    state = json.loads(json.dumps(begun.state_dict()))
    for name, source in SOURCES.items():
        batches = of(source(more()))
        batches.load_state_dict(state)
        say(name, first + gathered(batches))
    say("spawned", gathered(of(load(more(), 1, "spawn"))))

def chosen(say):
    accelerator = Accelerator(cpu=True)
    for name, source in SOURCES.items():
        ds = make()
        batches = loader.accelerate.prepare(accelerator, source(ds))
        for batch in batches:
            break
        batches.set_epoch(1)
        state = batches.state_dict()
        assert (state["epoch"], state["position"]) == (1, 0), (name, state)
        say(name, ids(batches))

def wrong(say):
    accelerator = Accelerator(cpu=True)
    for source in (make(rank=0, world_size=1), DataLoader(make(), batch_size=3), DataLoader(make(), batch_size=None),
                   DataLoader([1, 2]), DataLoader(make().batched(), batch_size=4),
                   loader.Loader(make(), stages=[loader.Filter(bool)], steps=3)):
        try:
            loader.accelerate.prepare(accelerator, source)
            say("wrong", "nothing was raised")
        except loader.errors.ConfigError as e:
            say("wrong", str(e))

def run_rank(rank, world, job, port):
    signal.alarm(110)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
                      MASTER_PORT=port)
    said = []
    globals()[job](lambda name, value: said.append([name, value]))
    (out / f"{job}-{rank}.json").write_text(json.dumps(said))
    dist.barrier()
    dist.destroy_process_group()

torch.set_num_threads(1)
import cachefs.errors
loader.errors = cachefs.errors
for item in sys.argv[3:]:  # imported once, then forked for every rank of every job
    job, count, port = item.split(":")
    world, children = int(count), []
    for rank in range(world):
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                run_rank(rank, world, job, port)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    print("job", job, "ok" if not any(codes) else codes, flush=True)
"""
JOBS = {
    "naive": WORLD,
    "prepared": WORLD,
    "metrics": WORLD,
    "states": WORLD,
    "wrong": WORLD,
    "alone": 1,
    "counted": WORLD,
    "chosen": WORLD,
}
COUNTS = [7, 5, 6, 3, 9]
MANY = [1 + shard % 5 for shard in range(70)]
SAMPLES = {shard << 32 | i for shard, count in enumerate(COUNTS) for i in range(count)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, COUNTS)
    return folder


@pytest.fixture(scope="module")
def said(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[Any]]]:
    """Job -> what each rank said, as pairs of a name and a value."""
    pytest.importorskip("accelerate")
    out = tmp_path_factory.mktemp("accelerate")
    (out / "many").mkdir()
    write_tars(out / "many", MANY)
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "NEARFLASH", "MASTER"))}
    ports = free_ports(len(JOBS))
    jobs = [f"{job}:{world}:{port}" for (job, world), port in zip(JOBS.items(), ports, strict=True)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), str(out), *jobs],
        env={**plain, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    assert all(f"job {job} ok" in done.stdout for job in JOBS), done.stdout
    return {job: [json.loads((out / f"{job}-{r}.json").read_text()) for r in range(w)] for job, w in JOBS.items()}


def share(folder: Path, rank: int, **options: Any) -> ShardDataset:
    chosen = {"batch_size": 4, "ids": True, "seed": 1, "rank": rank, "world_size": WORLD, **options}
    return ShardDataset(folder, **chosen)


def passes(folder: Path, rank: int, count: int, **options: Any) -> list[list[list[int]]]:
    ds = share(folder, rank, **options)
    return [[batch["__id__"].tolist() for batch in ds.batched()] for _ in range(count)]


@pytest.mark.timeout(400)
@pytest.mark.xdist_group("accelerate")
class TestAccelerate:
    def test_the_naive_way_is_an_error_that_names_the_way_out(self, said: Any) -> None:
        for rank, outcomes in enumerate(said["naive"]):
            messages = [value for name, value in outcomes if name != "divided"]
            assert len(messages) > 12
            for message in messages:
                assert isinstance(message, str), message
                assert f"would divide rank {rank}'s share of the data among 2 processes again" in message
                assert "use loader.accelerate.prepare(accelerator, dataloader)" in message
                assert "\n" not in message

    def test_a_data_set_that_yields_everything_may_be_divided(self, said: Any) -> None:
        shares = [{i for batch in dict(outcomes)["divided"] for i in batch} for outcomes in said["naive"]]
        assert shares[0] | shares[1] == SAMPLES

    def test_prepared_every_rank_has_its_own_batches(self, said: Any, folder: Path) -> None:
        for rank, outcomes in enumerate(said["prepared"]):
            first, second = passes(folder, rank, 2)
            assert len(outcomes) == 14
            for name, value in outcomes:
                assert value == (first[1:] if name.endswith("skipped") else [first, second, second]), name
        union = [i for outcomes in said["prepared"] for batch in outcomes[0][1][0] for i in batch]
        assert len(union) == len(set(union)) == 24  # three global batches of eight

    def test_metrics_see_every_sample_once(self, said: Any) -> None:
        for outcomes in said["metrics"]:
            for name, batches in outcomes:
                assert sorted(i for batch in batches for i in batch) == sorted(SAMPLES), name

    def test_states_of_the_accelerator_resume_exactly(self, said: Any, folder: Path) -> None:
        for rank, outcomes in enumerate(said["states"]):
            stream = [batch for batches in passes(folder, rank, 2) for batch in batches]
            for name, seen in outcomes:
                assert seen == stream, name

    def test_one_process_goes_on_where_a_state_says(self, said: Any, folder: Path) -> None:
        ds = share(folder, 0, world_size=1)
        epochs = [[batch["__id__"].tolist() for batch in ds.batched()] for _ in range(4)]
        outcomes = said["alone"][0]
        assert len(outcomes) == 4
        for name, seen in outcomes:
            assert seen == [epochs[2][3:], epochs[3], epochs[1], epochs[2]], name

    def test_metrics_of_a_data_set_that_is_counted_while_it_is_read(self, said: Any) -> None:
        samples = sorted(shard << 32 | i for shard, count in enumerate(MANY) for i in range(count))
        assert len(samples) % 8
        for outcomes in said["counted"]:
            assert len(outcomes) == 8
            for name, batches in outcomes:
                assert sorted(i for batch in batches for i in batch) == samples, name

    def test_an_epoch_that_is_chosen_after_a_broken_off_pass(self, said: Any, folder: Path) -> None:
        for rank, outcomes in enumerate(said["chosen"]):
            second = passes(folder, rank, 2)[1]
            assert len(outcomes) == 7
            for name, seen in outcomes:
                assert seen == second, name

    def test_what_does_not_fit_is_refused(self, said: Any) -> None:
        for outcomes in said["wrong"]:
            messages = [message for _, message in outcomes]
            assert "is read for 1 rank(s), but the accelerator has 2" in messages[0]
            assert "DataLoader(batch_size=3), but the data set deals this rank batches of 4" in messages[1]
            assert "DataLoader(batch_size=None), but" in messages[2]
            assert "no loader of a ShardDataset or Mixture" in messages[3]
            assert "DataLoader(batch_size=4), but the data set deals whole batches" in messages[4]
            assert "a Loader with filter stages" in messages[5]
