"""The training script's command line."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Options:
    """What the script is told; the same line every time a run is started."""

    data: str
    checkpoints: str
    records: str
    length: int
    batch_size: int
    crop: int
    save_every: int
    epochs: int


HELP = {
    "data": "URL that holds the three data sets, each in its folder: wds, mds, tokens",
    "checkpoints": "URL of the checkpoint store",
    "records": "folder in which each rank records its steps",
    "length": "tokens in a sample",
    "batch_size": "samples per rank and data set in a step",
    "crop": "tokens of each sample that are trained on",
    "save_every": "steps between checkpoints",
    "epochs": "passes over the data",
}


def parse(argv: list[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(prog="demo.train")
    for field in fields(Options):
        kind = int if field.type == "int" else str
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, required=True, help=HELP[field.name])
    return Options(**vars(parser.parse_args(argv)))
