"""Writing data sets in formats that other tools read: MDS, WebDataset tar, Parquet and token files.

Writers stream: they hold at most one shard. Their output becomes visible only when it is whole (:mod:`.output`).
"""

from __future__ import annotations

from .abc import Placed, WriteOptions, Writer, Written
from .output import Output, open_output
from .registry import WRITERS

__all__ = ["WRITERS", "Output", "Placed", "WriteOptions", "Writer", "Written", "open_output"]
