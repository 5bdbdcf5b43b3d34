"""Headerless token files as one run of tokens each: documents behind each other, told apart by a token that ends them.

For ``packing=``: cut into windows such files are read by :mod:`.tokens`, which says more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ..sample import Sample
from .abc import Bytes, Format, Joined, Ready, SampleIndex, all_there
from .dtypes import integer_name
from .tokens import RowIndex, Tokens


@dataclass(frozen=True)
class TokenFile(Format):
    """A file of token ids of ``dtype`` (little-endian), without a header or with NumPy's: one sample, ``tokens``.

    With ``packing=Packing(length, eos_id=...)`` its documents are packed. Raises ``ConfigError`` for another dtype than
    one of integers.
    """

    name: ClassVar[str] = "tokenfile"
    dense: ClassVar[bool] = True
    dtype: str = "uint16"

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", integer_name("TokenFile", "dtype", self.dtype))

    @property
    def _single(self) -> Tokens:
        return Tokens(1, dtype=self.dtype)

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> SampleIndex:
        return RowIndex(int(len(self._single.index(data, url)) > 0))

    def source(self, data: Bytes, index: Any) -> npt.NDArray[Any]:
        single = self._single
        return single.source(data, single.index(data, ""))[:, 0]

    def read(
        self, source: npt.NDArray[Any], index: Any, i: int, url: str, fields: frozenset[str] | None = None
    ) -> Sample:
        sample = Sample()
        if fields is None or "tokens" in fields:
            sample["tokens"] = source
        return sample

    def joined(self, source: npt.NDArray[Any], index: Any, field: str, url: str) -> Joined | None:
        if field != "tokens":
            return None
        return Joined(source, np.zeros(len(index), np.int64), np.array([len(source)] * len(index)))
