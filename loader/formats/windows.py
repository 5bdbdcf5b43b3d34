"""Windows over the tokens of files that say themselves what they hold (llm.c, Megatron).

What a window is, :class:`loader.formats.Tokens` says; here it is applied to one array of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from cachefs.errors import ConfigError, FormatError

from ..sample import Sample
from .tokens import RowIndex, Tokens

Tokens1D = npt.NDArray[Any]


@dataclass(frozen=True)
class WindowOptions:
    """Options that these formats share. See :class:`loader.formats.Tokens` for their meaning."""

    length: int | None = None
    stride: int | None = None
    labels: bool = False
    out: str | None = None

    def __post_init__(self) -> None:
        if self.length is not None:
            Tokens(self.length, self.stride, dtype="uint8", labels=self.labels, out=self.out)  # raises if one is wrong
        elif self.stride is not None or self.labels:
            raise ConfigError(f"{type(self).__name__}: stride and labels need a length")
        elif self.out is not None:
            Tokens(1, dtype="uint8", out=self.out)

    def identity(self) -> str:
        return repr(replace(self, out=None))  # it changes no sample's place

    def windows(self, tokens: Tokens1D, url: str) -> Windows | None:
        """The windows of a file's tokens; ``None`` if no length was given.

        Raises ``ConfigError`` if ``out`` cannot hold every value of the file's dtype.
        """
        if self.out is not None and not np.can_cast(tokens.dtype, np.dtype(self.out), "safe"):
            raise ConfigError(f"out={self.out!r} cannot hold every id of dtype {tokens.dtype.name}", url=url)
        if self.length is None:
            return None
        if tokens.dtype.kind not in "iu":
            raise FormatError(f"holds {tokens.dtype.name} values, of which no token windows are made", url=url)
        options = Tokens(self.length, self.stride, dtype=tokens.dtype.name, labels=self.labels, out=self.out)
        return Windows(options, tokens)


class Windows:
    """All windows of one array of tokens."""

    def __init__(self, options: Tokens, tokens: Tokens1D) -> None:
        raw = tokens.view(np.uint8)
        self._options = options
        self._index = RowIndex(options.windows_in(len(raw), ""))
        self._rows = options.source(raw, self._index)

    @property
    def rows(self) -> int:
        return self._index.rows

    def read(self, i: int, url: str, fields: frozenset[str] | None) -> Sample:
        return self._options.read(self._rows, self._index, i, url, fields)

    def columns(self, which: npt.NDArray[np.int64], fields: frozenset[str] | None) -> dict[str, Any]:
        """The windows ``which``, as new arrays of shape ``(len(which), length)``."""
        options = self._options
        out = np.empty((len(which), options.window), options.stored)
        options.gather(self._rows, which, out)
        parts = {"tokens": out[:, : options.length]}
        if options.labels:
            parts["labels"] = out[:, 1:]
        return {
            name: np.array(part, dtype=options.delivered, order="C", copy=options.labels or options.out is not None)
            for name, part in parts.items()
            if fields is None or name in fields
        }


def delivered(tokens: Tokens1D, out: str | None) -> Tokens1D:
    """``tokens`` themselves, or a new array of dtype ``out``."""
    return tokens if out is None else tokens.astype(out)
