"""What Parquet and Arrow have in common once their columns are decoded (:mod:`loader.formats.arrow_pieces`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..sample import Sample
from .abc import Format
from .arrow_pieces import Fields, Pieces
from .table_lengths import list_lengths


@dataclass(frozen=True)
class Table(Format):
    """A format of rows and columns whose source is :class:`Pieces`, and whose index names the columns of images."""

    columnar: ClassVar[bool] = True
    stateful: ClassVar[bool] = True

    def read(self, source: Pieces, index: Any, i: int, url: str, fields: Fields = None) -> Sample:
        return source.read(i, fields, url)

    def columns(
        self, source: Pieces, index: Any, rows: npt.NDArray[np.int64], url: str, fields: Fields = None
    ) -> dict[str, Any]:
        return source.columns(rows, fields, url)

    def lengths(self, source: Pieces, index: Any, field: str, url: str) -> npt.NDArray[np.int64] | None:
        return list_lengths(source, field, url)

    def kind(self, index: Any, name: str) -> str:
        return "image" if name in index.images else ""
