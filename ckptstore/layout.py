"""Names inside a checkpoint store: the same on POSIX and on object stores. Pure functions, no I/O.

::

    generations/000003.json                          a claim
    generations/000003.start.json                    where that generation started from
    step-000000000100-g000003/manifest.json          the commit record (or, after a deletion, a tombstone)
    step-000000000100-g000003/tombstone.json         the tombstone where a manifest cannot be replaced
    step-000000000100-g000003/<attempt>-p0004.json   part of node 4
    step-000000000100-g000003/<attempt>-r00012-0003.safetensors   segment 3 of rank 12
    .tmp-step-000000000100-g000003-<attempt>/        POSIX only: a step that is being written
    .tmp-step-000000000100-g000003-<attempt>.dead-<16 hex>/   POSIX only: one that was given up and is being removed

Numbers are decimal, zero-padded to the width shown, and wider where they need to be; every number has exactly one
spelling. Parsers are strict: what they do not know gives ``None`` and belongs to somebody else, so it is ignored and
never deleted. A step with a tombstone is no checkpoint and its folder is never used again.

**Attempt ids** come from outside (a scheduler, a user) and may hold anything. Only :func:`attempt_token` of one ever
becomes part of a name: an id of 1 to 32 characters ``a-z 0-9 _`` stands for itself; of any other, up to 24 characters
are kept for the eye, lower-cased and with ``_`` for what is not allowed, and ``-`` with 16 hexadecimal digits of its
blake2b digest follows. The first kind has no ``-`` in it, so two ids share a token only if their digests collide. The
id itself stands in the claim and in the manifest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cachefs.errors import CheckpointError, ConfigError
from cachefs.hashing import name_digest

GENERATIONS = "generations"
MANIFEST = "manifest.json"
TOMBSTONE = "tombstone.json"
TEMP_PREFIX = ".tmp-"


def _number(width: int) -> str:
    """A pattern for decimals padded to ``width``: exactly one spelling for each number."""
    return rf"(\d{{{width}}}|[1-9]\d{{{width},}})"


_TOKEN = r"([a-z0-9_]{1,32}|[a-z0-9_]{1,24}-[0-9a-f]{16})"
_CLAIM = re.compile(rf"{GENERATIONS}/{_number(6)}\.json", re.ASCII)
_START = re.compile(rf"{GENERATIONS}/{_number(6)}\.start\.json", re.ASCII)
_STEP = re.compile(rf"step-{_number(12)}-g{_number(6)}", re.ASCII)
_PART = re.compile(rf"{_TOKEN}-p{_number(4)}\.json", re.ASCII)
_SEGMENT = re.compile(rf"{_TOKEN}-r{_number(5)}-{_number(4)}\.safetensors", re.ASCII)
_TEMP = re.compile(rf"\.tmp-(step-{_number(12)}-g{_number(6)})-{_TOKEN}(?:\.dead-[0-9a-f]{{16}})?", re.ASCII)
_PLAIN_ATTEMPT = re.compile(r"[a-z0-9_]{1,32}", re.ASCII)


@dataclass(frozen=True, order=True)
class StepRef:
    """One checkpoint: a step of one generation. Orders by step, then generation."""

    step: int
    generation: int

    def __post_init__(self) -> None:
        if self.step < 0 or self.generation < 1:
            raise ConfigError(
                f"step {self.step} of generation {self.generation} cannot be", hint="steps start at 0, generations at 1"
            )

    @property
    def folder(self) -> str:
        """The step's folder, without a trailing slash."""
        return f"step-{self.step:012d}-g{self.generation:06d}"

    @property
    def manifest(self) -> str:
        """Name of the commit record."""
        return f"{self.folder}/{MANIFEST}"

    @property
    def tombstone(self) -> str:
        """Name of the tombstone that stands beside a manifest which could not be replaced."""
        return f"{self.folder}/{TOMBSTONE}"

    def temp_folder(self, attempt: str) -> str:
        """The hidden folder that ``attempt`` fills before it becomes :attr:`folder` (POSIX)."""
        return f"{TEMP_PREFIX}{self.folder}-{attempt_token(attempt)}"

    def __str__(self) -> str:
        return f"step {self.step} (generation {self.generation})"


@dataclass(frozen=True)
class PartName:
    """A parsed part name."""

    token: str
    node: int


@dataclass(frozen=True)
class SegmentName:
    """A parsed segment name."""

    token: str
    rank: int
    number: int


def attempt_token(attempt: str) -> str:
    """What stands for an attempt id in names; see the module's text. Raises :class:`ConfigError` for an empty id."""
    if not attempt:
        raise ConfigError("an empty attempt id", hint="give a text that no other run of this job has")
    if _PLAIN_ATTEMPT.fullmatch(attempt):
        return attempt
    shown = re.sub(r"[^a-z0-9_]", "_", attempt[:24].lower(), flags=re.ASCII)
    return f"{shown[:24]}-{name_digest(attempt)[:16]}"


def claim_name(generation: int) -> str:
    """``generations/000003.json``."""
    return f"{GENERATIONS}/{generation:06d}.json"


def start_name(generation: int) -> str:
    """``generations/000003.start.json``."""
    return f"{GENERATIONS}/{generation:06d}.start.json"


def part_name(attempt: str, node: int) -> str:
    """A part's file name within the step's folder."""
    return f"{attempt_token(attempt)}-p{node:04d}.json"


def segment_name(attempt: str, rank: int, number: int) -> str:
    """A segment's file name within the step's folder; ``number`` counts the segments of one rank from 0."""
    return f"{attempt_token(attempt)}-r{rank:05d}-{number:04d}.safetensors"


def parse_claim(name: str) -> int | None:
    """The generation of a claim's name (from the root)."""
    return _generation(_CLAIM.fullmatch(name))


def parse_start(name: str) -> int | None:
    """The generation of a start record's name (from the root)."""
    return _generation(_START.fullmatch(name))


def parse_step(folder: str) -> StepRef | None:
    """The step of a folder's name (no slash)."""
    return _ref(_STEP.fullmatch(folder))


def parse_temp(folder: str) -> tuple[StepRef, str] | None:
    """Step and attempt token of a temporary folder's name (no slash), also of one that is being removed."""
    match = _TEMP.fullmatch(folder)
    ref = parse_step(match[1]) if match else None
    return (ref, match[4]) if match and ref else None


def parse_part(file: str) -> PartName | None:
    """The parts of a part's file name (no folder)."""
    match = _PART.fullmatch(file)
    return PartName(match[1], int(match[2])) if match else None


def parse_segment(file: str) -> SegmentName | None:
    """The parts of a segment's file name (no folder)."""
    match = _SEGMENT.fullmatch(file)
    return SegmentName(match[1], int(match[2]), int(match[3])) if match else None


def check_file(file: str) -> None:
    """That ``file`` may be written into a step's folder: a part or a segment. Raises :class:`ConfigError`."""
    if parse_part(file) is None and parse_segment(file) is None:
        raise ConfigError(
            f"{file!r} is no name for a file of a checkpoint", hint="make it with layout.part_name or segment_name"
        )


def is_segment(file: str) -> bool:
    """Whether a manifest may call a segment so: its name in the step's own folder, or ``<step folder>/<segment>``."""
    folder, slash, name = file.rpartition("/")
    return parse_segment(name) is not None and (not slash or parse_step(folder) is not None)


def resolve(ref: StepRef, file: str) -> str:
    """The name from the root of a segment that the manifest of ``ref`` calls ``file``.

    Raises :class:`CheckpointError` for anything but :func:`is_segment`: a manifest comes from outside and must not
    lead anywhere else.
    """
    if not is_segment(file):
        raise CheckpointError(f"the manifest names a file {file!r}, which no segment is called", url=ref.folder)
    return file if "/" in file else f"{ref.folder}/{file}"


def _generation(match: re.Match[str] | None) -> int | None:
    return int(match[1]) or None if match else None


def _ref(match: re.Match[str] | None) -> StepRef | None:
    return StepRef(int(match[1]), int(match[2])) if match and int(match[2]) else None
