"""The samples that an archive's members make, collected in arrays. The rules are those of :mod:`.webdataset`."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .abc import Damage
from .tar import shown
from .tar_columns import Columns, Places, row_bytes
from .tar_header import BLOCK
from .tar_index import TarIndex
from .tar_names import SplitNames, split_names
from .tar_runs import Run

META = re.compile(r"__[^/]*__(?:$|/)")
"""Names of members that belong to no sample."""
KEY = "__key__"
_MOST_FIELDS = 62
"""Different fields whose repeats are looked for by the bits of one word."""

Numbers = npt.NDArray[np.int32]


class TarSamples:
    """Takes members in archive order, one by one or in runs, and makes the index of their samples."""

    def __init__(self, *, last_dot: bool) -> None:
        """``last_dot``: base names are split at their last dot, not at the first one."""
        self._last_dot = last_dot
        self._starts, self._sizes, self._names = array("q"), array("q"), array("i")
        self._first, self._key_ends = array("q"), array("q", [0])
        self._keys = bytearray()
        self._numbers: dict[str, int] = {}
        self._codes: dict[bytes, int] = {}  # the fields' numbers by what the names of members have behind the dot
        self._damaged: dict[int, Damage] = {}
        self._skipped = 0
        self._current: str | None = None
        self._seen: set[str] = set()

    def add(self, path: str, header: int, start: int, size: int) -> None:
        """One member."""
        base = path.rfind("/") + 1
        dot = path.rfind(".", base) if self._last_dot else path.find(".", base)
        if dot <= 0 or (dot == base and _nameless(path, base)) or (path.startswith("__") and META.match(path)):
            self._skipped += 1
            return
        key, name = path[:dot], path[dot + 1 :].lower()
        if key != self._current:
            self._current = key
            self._seen = {KEY}
            self._first.append(len(self._starts))
            self._keys += _raw(key)
            self._key_ends.append(len(self._keys))
        if name in self._seen:
            sample = len(self._first) - 1
            if sample not in self._damaged:
                self._damaged[sample] = Damage(f"member {shown(path)} repeats a field of its sample", header)
            return
        self._seen.add(name)
        self._starts.append(start)
        self._sizes.append(size)
        self._names.append(self._numbers.setdefault(name, len(self._numbers)))

    def extend(self, run: Run) -> None:
        """Members that follow each other. Those of a run in which any is odd are taken one by one."""
        count, begun = len(run.sizes), 0
        while begun < count and self._goes_on(run, begun):
            self._add(run, begun)
            begun += 1
        if begun < count and not self._extend(run, begun):
            for i in range(begun, count):
                self._add(run, i)

    def index(self, notes: Sequence[str]) -> TarIndex:
        """The index of all that was taken. Nothing can be added any more."""
        self._first.append(len(self._starts))
        return TarIndex(
            self._starts,
            self._sizes,
            self._names,
            self._first,
            self._key_ends,
            bytes(self._keys),
            tuple(self._numbers),
            self._damaged,
            self._skipped,
            tuple(notes),
        )

    def _add(self, run: Run, i: int) -> None:
        header = run.headers.item(i)
        self.add(_text(run.name(i)), header, header + BLOCK, run.sizes.item(i))

    def _goes_on(self, run: Run, i: int) -> bool:
        """Whether member ``i`` may belong to the sample that was begun before."""
        return self._current is not None and run.name(i).startswith(_raw(self._current) + b".")

    def _extend(self, run: Run, begun: int) -> bool:
        """The members from ``begun`` on, which begin a sample, all at once; false, and nothing taken, if one is odd."""
        if run.prefixes is not None:
            return False
        count = len(run.sizes) - begun
        names = [column[begun:] if len(column) > 1 else column for column in run.names]
        split = split_names(names, count, last_dot=self._last_dot)
        numbers = split and self._numbered(split.ends, count)
        if split is None or numbers is None:
            return False
        begins = np.ones(count, np.bool_)
        begins[1:] = False
        for column in split.keys:
            if len(column) > 1:
                begins[1:] |= column[1:] != column[:-1]
        samples = np.flatnonzero(begins)
        if _repeats(numbers, samples):
            return False
        self._first.frombytes((samples + len(self._starts)).tobytes())
        self._starts.frombytes((run.headers[begun:] + BLOCK).tobytes())
        self._sizes.frombytes(run.sizes[begun:].tobytes())
        self._names.frombytes(numbers.tobytes())
        lengths = split.lengths[samples] if len(split.lengths) > 1 else np.full(len(samples), split.lengths[0])
        self._key_ends.frombytes((np.cumsum(lengths) + len(self._keys)).tobytes())
        self._keys += _packed(split, samples)
        self._current = _text(self._keys[self._key_ends[-2] :])
        fields = tuple(self._numbers)
        self._seen = {KEY, *(fields[number] for number in numbers[samples[-1] :].tolist())}
        return True

    def _numbered(self, ends: Columns, count: int) -> Numbers | None:
        """The numbers of the fields that the names' ends are; ``None`` if they are many or cannot be."""
        numbers = np.full(count, -1, np.int32)
        for _ in range(_MOST_FIELDS):
            i = int(numbers.argmin())
            if numbers[i] >= 0:
                return numbers
            raw, alike = row_bytes(ends, i), np.ones(count, np.bool_)
            number = self._codes.get(raw)
            if number is None:
                name = _text(raw).lower()
                if name == KEY:
                    return None
                number = self._codes[raw] = self._numbers.setdefault(name, len(self._numbers))
            for column in ends:
                if len(column) > 1:
                    alike &= column == column[i]
            numbers[alike] = number
        return None


def _packed(split: SplitNames, samples: Places) -> bytes:
    """The keys of these members, one behind the other."""
    words = np.empty((len(samples), len(split.keys)), "<u8")
    for number, column in enumerate(split.keys):
        words[:, number] = column[samples] if len(column) > 1 else column
    chars = words.view(np.uint8)
    if len(split.lengths) == 1:
        return chars[:, : split.lengths.item(0)].tobytes()
    return chars[np.arange(chars.shape[1]) < split.lengths[samples][:, None]].tobytes()


def _repeats(numbers: Numbers, samples: Places) -> bool:
    """Whether a sample has a field twice, or fields have numbers too large to tell. ``samples``: where they begin."""
    if len(samples) == len(numbers):
        return False
    if numbers.max() > _MOST_FIELDS:
        return True
    bits = np.int64(1) << numbers.astype(np.int64)
    return bool((np.add.reduceat(bits, samples) != np.bitwise_or.reduceat(bits, samples)).any())


def _nameless(path: str, base: int) -> bool:
    """Whether a hidden file lies in a folder whose name, having a dot, cannot be its key."""
    return "." in path[path.rfind("/", 0, base - 1) + 1 : base]


def _text(raw: bytes | bytearray) -> str:
    return raw.decode("utf-8", "surrogateescape")


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")
