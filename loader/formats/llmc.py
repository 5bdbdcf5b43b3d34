"""llm.c token files: a header of 256 int32, then all tokens of the file.

Follows ``write_datafile`` of llm.c (its ``dev/data/data_common.py``): the header holds a magic number, a version and
the count of tokens. 20240520, version 1, are GPT-2's uint16 tokens; 20240801, version 7, are Llama 3's uint32 tokens.

On purpose different from llm.c's own loader: a file is one sample unless a ``length`` is given, windows need not be
aligned to a batch, and a file of another size than its header says is an error that names both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from cachefs.errors import FormatError

from ..sample import Sample
from .abc import Bytes, Format, Joined, Ready, SampleIndex, all_there
from .tokens import RowIndex
from .windows import WindowOptions, Windows, delivered

HEADER = 1024
"""Bytes."""
_KINDS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
_MAGICS = frozenset(magic for magic, _ in _KINDS)


class LlmCSource(NamedTuple):
    tokens: npt.NDArray[Any]
    """All tokens, a view of the file."""
    windows: Windows | None


@dataclass(frozen=True)
class LlmC(WindowOptions, Format):
    """Token files of llm.c.

    Without ``length`` each file is one sample: ``tokens`` is a view of all its tokens. With it, samples are windows,
    and ``length``, ``stride``, ``labels`` and ``out`` are those of :class:`loader.formats.Tokens`.
    """

    name: ClassVar[str] = "llmc"
    dense: ClassVar[bool] = True
    columnar: ClassVar[bool] = True

    @classmethod
    def matches(cls, head: bytes, data: Bytes) -> bool:
        first = np.frombuffer(head[:8], "<i4").tolist() if len(head) >= 8 else []
        return tuple(first) in _KINDS and data[:8].tobytes() == head[:8]

    def index(self, data: Bytes, url: str, ready: Ready = all_there) -> SampleIndex:
        tokens = _tokens(data, url)
        windows = self.windows(tokens, url)
        return RowIndex(int(len(tokens) > 0)) if windows is None else RowIndex(windows.rows)

    def source(self, data: Bytes, index: Any) -> LlmCSource:
        tokens = _tokens(data, "")
        return LlmCSource(tokens, self.windows(tokens, ""))

    def read(self, source: LlmCSource, index: Any, i: int, url: str, fields: frozenset[str] | None = None) -> Sample:
        if source.windows is not None:
            return source.windows.read(i, url, fields)
        sample = Sample()
        if fields is None or "tokens" in fields:
            sample["tokens"] = delivered(source.tokens, self.out)
        return sample

    def columns(
        self,
        source: LlmCSource,
        index: Any,
        rows: npt.NDArray[np.int64],
        url: str,
        fields: frozenset[str] | None = None,
    ) -> dict[str, Any]:
        if source.windows is not None:
            return source.windows.columns(rows, fields)
        if fields is not None and "tokens" not in fields:
            return {}
        return {"tokens": [delivered(source.tokens, self.out) for _ in rows]}

    def joined(self, source: LlmCSource, index: Any, field: str, url: str) -> Joined | None:
        if source.windows is not None or field != "tokens":
            return None
        return Joined(source.tokens, np.zeros(len(index), np.int64), np.array([len(source.tokens)] * len(index)))


def _tokens(data: Bytes, url: str) -> npt.NDArray[Any]:
    """All tokens, the header checked against the file's size."""
    size = len(data)
    if size < HEADER:
        raise FormatError(f"{size} bytes are too few for the header of an llm.c file", url=url, offset=0)
    magic, version, count = data[:12].view("<i4").tolist()
    dtype = _KINDS.get((magic, version))
    if dtype is None:
        what = f"version {version} of an llm.c file is not known" if magic in _MAGICS else "no header of llm.c"
        raise FormatError(what, url=url, offset=4 if magic in _MAGICS else 0)
    wanted = HEADER + count * np.dtype(dtype).itemsize
    if count < 0 or wanted != size:
        raise FormatError(
            f"its header says {count} tokens, which make {wanted} bytes, but it has {size}: cut off or damaged",
            url=url,
            offset=8,
        )
    return data[HEADER:].view(dtype)
