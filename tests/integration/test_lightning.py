"""Lightning's Trainer: what trains on which batches, and resumes within an epoch from its checkpoints."""

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

PREAMBLE = (Path(__file__).parent / "torchvision_preamble.py").read_text()
PROGRAM = '''
import json, logging, signal, sys, warnings
from pathlib import Path
import torch
import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
import loader

signal.alarm(280)
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
torch.set_num_threads(1)
folder, out = Path(sys.argv[1]), Path(sys.argv[2])

def make(**options):
    return loader.ShardDataset(folder, **{"batch_size": 4, "ids": True, "seed": 1, **options})

def load(kind, ds, workers=0):
    return kind(ds, batch_size=4, collate_fn=loader.collate, num_workers=workers)

class Data(pl.LightningDataModule):
    """A plain DataLoader with workers, whose position is in the batches."""

    def __init__(self, ds):
        super().__init__()
        self.ds = ds

    def train_dataloader(self):
        return load(DataLoader, self.ds, 2)

    def on_after_batch_transfer(self, batch, number):
        if self.trainer.training:
            self.state = self.ds.state_after(batch)
        return batch

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.ds.load_state_dict(state)

SOURCES = {
    "Loader": loader.Loader,
    "batches": lambda ds: ds.batched(),
    "StatefulDataLoader": lambda ds: load(StatefulDataLoader, ds),
    "StatefulDataLoader with workers": lambda ds: load(StatefulDataLoader, ds, 2),
    "DataLoader in a data module": Data,
}

class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.seen = []

    def training_step(self, batch, number):
        assert isinstance(batch, loader.Batch) and batch.stamp is not None
        self.seen.append(batch["__id__"].tolist())
        return self.layer(batch["cls"].float()[:, None]).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-3)

class Saving(pl.Callback):
    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, model, outputs, batch, number):
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)

def trainer(steps, callbacks=(), **options):
    return pl.Trainer(max_steps=steps, callbacks=list(callbacks), **{
        "accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
        "enable_checkpointing": False, **options})

def resumes(name, source):
    """Trained to each step in turn; the checkpoint is made while training goes on behind it."""
    seen, path = [], None
    for step in (3, 7, 9, 14, 17):  # an epoch has 7 batches
        model = Model()
        made = source(make())
        how = {"datamodule": made} if isinstance(made, Data) else {"train_dataloaders": made}
        saved = out / f"{name}-{step}.ckpt"
        trainer(step + 1, [Saving(step, saved)]).fit(model, **how, ckpt_path=path)
        seen, path = seen + model.seen[: step - len(seen)], saved
    return seen

def ranks():
    """Two ranks by Lightning's own launcher: each has its own share, by itself."""
    seen = {}
    for name, source in (("Loader", loader.Loader), ("DataLoader", lambda ds: load(DataLoader, ds, 1))):
        model, made = Model(), source(make())
        trained = trainer(3, devices=2, strategy="ddp")
        trained.fit(model, made)
        assert not isinstance(getattr(trained.train_dataloader, "sampler", None), DistributedSampler)
        seen[name] = model.seen
        rank = trained.global_rank
    return rank, seen

if sys.argv[3] == "resumes":
    (out / "resumes.json").write_text(json.dumps({name: resumes(name, source) for name, source in SOURCES.items()}))
else:
    rank, seen = ranks()
    (out / f"ranks-{rank}.json").write_text(json.dumps(seen))
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [7, 5, 6, 3, 9])
    return folder


def run(folder: Path, out: Path, what: str) -> None:
    pytest.importorskip("torchdata")
    (out / "program.py").write_text(PREAMBLE + PROGRAM)
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("TORCHELASTIC", "NEARFLASH", "MASTER"))}
    plain |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", out / "program.py", folder, out, what],
        env={**plain, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout


def stream(folder: Path, epochs: int, **options: Any) -> list[list[int]]:
    ds = ShardDataset(folder, batch_size=4, ids=True, seed=1, **options)
    return [batch["__id__"].tolist() for _ in range(epochs) for batch in ds.batched()]


@pytest.mark.timeout(320)
def test_checkpoints_resume_within_an_epoch_in_a_row(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path, "resumes")
    outcomes = json.loads((tmp_path / "resumes.json").read_text())
    assert len(outcomes) == 5
    for name, seen in outcomes.items():
        assert seen == stream(folder, 3)[:17], name


@pytest.mark.slow
@pytest.mark.timeout(320)
def test_every_rank_has_its_own_batches(folder: Path, tmp_path: Path) -> None:
    run(folder, tmp_path, "ranks")
    for rank in range(2):
        for name, seen in json.loads((tmp_path / f"ranks-{rank}.json").read_text()).items():
            assert seen == stream(folder, 1, rank=rank, world_size=2), name
