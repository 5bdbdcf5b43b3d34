"""All writers by the name that ``--to`` takes."""

from __future__ import annotations

from .abc import Writer
from .mds import MdsWriter
from .parquet import ParquetWriter
from .tar import TarWriter
from .tokens import TokensWriter

WRITERS: dict[str, type[Writer]] = {
    "mds": MdsWriter,
    "wds": TarWriter,
    "parquet": ParquetWriter,
    "tokens": TokensWriter,
}
