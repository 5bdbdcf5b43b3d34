"""Damaged shards: each format reads mutated files to a typed error or to data, never to a crash, a hang or nonsense.

``python -m tests.fault.format_damage CASE SEED COUNT`` runs in a process of its own, since a reader in C may take the
whole process with it; the mutation it died of is then known by its number, and can be made again.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import random
import resource
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cachefs.errors import DataError, NotFound
from loader import DataWarning

SECONDS = 20
"""For one mutated file."""
MEMORY = 6 << 30
"""Bytes of address space: a reader that believes a declared size of terabytes shows."""


KINDS = ("cut", "bit", "bit", "bytes", "number", "zero", "hole", "splice", "grow")


class Readable(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Any: ...


@dataclass(frozen=True)
class Case:
    """One kind of file. ``build`` makes small valid files, the first of which is opened.

    ``checksummed``: whatever is read without an error must be what was written. ``mutated``: the files that are
    damaged (default: the first). ``kinds``: the kinds of damage (default: all). ``told``: where fewer samples are read
    than were written there must be a warning, unless what was lost are a file's last bytes.
    """

    name: str
    build: Callable[[random.Random], dict[str, bytes]]
    open: Callable[[Path], Readable]
    checksummed: bool = False
    mutated: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    told: bool = False


def cases() -> dict[str, Case]:
    """All cases, by name, of the modules in :mod:`tests.fault.damage_cases`."""
    package = importlib.import_module("tests.fault.damage_cases")
    found: dict[str, Case] = {}
    for module in pkgutil.iter_modules(package.__path__):
        for case in importlib.import_module(f"tests.fault.damage_cases.{module.name}").CASES:
            assert case.name not in found, case.name
            found[case.name] = case
    return found


def mutations(
    rng: random.Random, data: bytes, count: int, kinds: tuple[str, ...] = KINDS
) -> Iterator[tuple[str, bytes]]:
    """``count`` ways to damage ``data``: cut, bits and bytes changed, runs moved, zeroed, doubled, numbers blown up,
    and whole blocks lost, as disks and copies lose them."""
    size = len(data)
    for _ in range(count):
        kind = rng.choice(kinds)
        out = bytearray(data)
        if not size:
            yield "grow", bytes(rng.randbytes(rng.randint(1, 40)))
            continue
        at = rng.randrange(size)
        if kind == "cut":
            out = out[:at]
        elif kind == "bit":
            out[at] ^= 1 << rng.randrange(8)
        elif kind == "bytes":
            for _ in range(rng.randint(1, 8)):
                out[rng.randrange(size)] = rng.randrange(256)
        elif kind == "number":
            width = rng.choice((1, 2, 4, 8))
            at -= at % width
            value = rng.choice((0, 1, -1, 1 << (8 * width - 1), rng.getrandbits(8 * width), size, size + 1))
            out[at : at + width] = (value % (1 << (8 * width))).to_bytes(width, rng.choice(("little", "big")))
            del out[size:]
        elif kind == "zero":
            end = min(at + rng.randint(1, 64), size)
            out[at:end] = bytes(end - at)
        elif kind == "hole":
            block = rng.choice((512, 4096))
            length = rng.choice((512, 512, 1024, 4096, 16 << 10, 16 << 10, 40 << 10))
            at -= at % block
            end = min(at + length, size)
            out[at:end] = bytes(end - at)
        elif kind == "splice":
            length = rng.randint(1, 64)
            out[at : at + length] = data[(start := rng.randrange(size)) : start + length]
        else:
            out[at:at] = rng.randbytes(rng.randint(1, 16))
        yield kind, bytes(out)


def digest(value: Any) -> Any:
    """A value as something that can be compared; every byte of it is touched on the way."""
    if isinstance(value, dict):
        return tuple((str(k), digest(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return tuple(digest(v) for v in value)
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return tuple(digest(v) for v in value.ravel().tolist())
        return (str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, np.generic):
        return (str(value.dtype), value.tobytes())
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    return repr(value)


def read_all(shard: Readable) -> list[Any]:
    """Every sample; a damaged one as ``None``."""
    out: list[Any] = []
    for i in range(len(shard)):
        try:
            out.append(digest(shard[i]))
        except DataError as e:
            refuse_believers(e)
            assert "\n" not in str(e), f"an error of several lines: {e}"
            out.append(None)
    return out


def refuse_believers(error: BaseException) -> None:
    """A reader that ran out of memory believed a size that was declared, whatever it made of that afterwards."""
    seen: BaseException | None = error
    while seen is not None:
        assert not isinstance(seen, MemoryError), f"memory ran out, and that was told as damage: {error}"
        seen = seen.__cause__ or seen.__context__


@dataclass
class Outcome:
    """What became of the mutated files of one case."""

    refused: int = 0
    equal: int = 0
    partly: int = 0
    """Read with some samples refused, the others as written."""
    other: int = 0
    """Read to other data than was written: right where nothing in the file could tell."""


def trial(case: Case, path: Path, wanted: list[Any], *, whole_end: bool = True) -> str:
    """Read ``path``; which field of :class:`Outcome` it was. ``whole_end``: the file's last bytes are as they were."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", DataWarning)
        try:
            found = read_all(case.open(path))
        except (DataError, NotFound) as e:
            refuse_believers(e)
            return "refused"
    if found == wanted:
        return "equal"
    if case.told and whole_end and len(found) < len(wanted):
        assert told, f"{case.name}: {len(wanted) - len(found)} samples are lost without a word"
    good = [sample for sample in found if sample is not None]
    if len(found) == len(wanted):
        right = all(sample in (None, other) for sample, other in zip(found, wanted, strict=True))
    else:
        right = len(good) < len(found) and all(sample in wanted for sample in good)
    return "partly" if right else "other"


def run(case: Case, seed: int, count: int, tell: Callable[[str], None]) -> Outcome:
    """``count`` mutations from ``seed`` on; ``tell`` hears of each before it is tried."""
    rng = random.Random(f"{case.name} {seed}")
    outcome = Outcome()
    with tempfile.TemporaryDirectory() as root:
        files = case.build(rng)
        first = next(iter(files))
        for name, data in files.items():
            path = Path(root, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        wanted = read_all(case.open(Path(root, first)))
        assert wanted and None not in wanted, f"{case.name}: the undamaged file does not read"
        targets = case.mutated or (first,)
        for number in range(count):
            name = targets[number % len(targets)]
            kind, data = next(mutations(rng, files[name], 1, case.kinds))
            tell(f"{number} {kind} {name}")
            # another file each time: one that is mapped must not change under its reader
            Path(root, name).unlink()
            Path(root, name).write_bytes(data)
            signal.alarm(SECONDS)
            ends = len(data.rstrip(b"\0")) == len(files[name].rstrip(b"\0"))
            result = trial(case, Path(root, first), wanted, whole_end=ends)
            signal.alarm(0)
            setattr(outcome, result, getattr(outcome, result) + 1)
            if result == "other" and case.checksummed:
                raise AssertionError(f"{case.name}: mutation {number} ({kind} in {name}) read to other data")
            Path(root, name).unlink()
            Path(root, name).write_bytes(files[name])
    return outcome


def main() -> None:
    name, seed, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    last = ""

    def tell(what: str) -> None:
        nonlocal last
        last = what
        sys.stderr.write(what + "\n")

    try:
        outcome = run(cases()[name], seed, count, tell)
    except BaseException as e:
        e.add_note(f"{name}, seed {seed}, at: {last}")
        raise
    print(json.dumps(outcome.__dict__))


if __name__ == "__main__":
    main()
