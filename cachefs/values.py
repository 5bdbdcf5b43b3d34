"""What each kind of setting may be: values of arguments, environment and files, made of one type and checked.

Every reader takes its own results again, and raises ``ValueError`` for what it cannot take.
"""

from __future__ import annotations

import base64
import math
import os
import re
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

from .errors import ConfigError

_MOST_BYTES = 2**63 - 1
_MOST_SECONDS = 1e9
"""Longer times do not fit into the system's own structures everywhere."""


def parse_size(text: Any) -> int:
    """Bytes from ``"64"``, ``"10GB"``, ``"1.5 TiB"`` (decimal and binary units; a bare letter is binary)."""
    if isinstance(text, int) and not isinstance(text, bool):
        size = text
    else:
        m = isinstance(text, str) and re.fullmatch(
            r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(i?)(b?)\s*", text, re.ASCII | re.IGNORECASE
        )
        if not m:
            raise ConfigError(f"{text!r} is not a size", hint="write for example 500GB, 1.5TiB or a number of bytes")
        number, unit, binary, byte = m.groups()
        base = 1024 if binary or not byte else 1000
        size = int(Decimal(number) * base ** (" kmgtp".index(unit.lower()) if unit else 0))
    if not 0 <= size <= _MOST_BYTES:
        raise ConfigError("not between 0 and 2**63 bytes")
    return size


def optional_size(raw: Any) -> int | None:
    """``None`` is a value of its own."""
    return None if raw is None else parse_size(raw)


def at_least(least: int) -> Callable[[Any], int]:
    """A reader of whole numbers."""

    def read(raw: Any) -> int:
        if isinstance(raw, bool) or not isinstance(raw, (int, str)):
            raise ValueError("not a whole number")
        number = int(raw)
        if number < least:
            raise ValueError(f"less than {least}")
        return number

    return read


def to_share(raw: Any) -> float:
    """A part of a whole, between 0 and 1."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError("not a number")
    number = float(raw)
    if not 0 <= number <= 1:
        raise ValueError("not between 0 and 1")
    return number


def seconds(*, zero: bool) -> Callable[[Any], float]:
    """A reader of times; ``zero`` says whether 0 is one."""

    def read(raw: Any) -> float:
        if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
            raise ValueError("not a number of seconds")
        number = float(raw)
        if not math.isfinite(number) or number < 0 or (number == 0 and not zero) or number > _MOST_SECONDS:
            raise ValueError("not a time" if zero else "not a time greater than 0")
        return number

    return read


def to_weight(raw: Any) -> float:
    """A number greater than 0 that means something beside others of its kind."""
    if isinstance(raw, bool) or not isinstance(raw, (int, float, str)):
        raise ValueError("not a number")
    number = float(raw)
    if not 0 < number < math.inf:
        raise ValueError("not a number greater than 0")
    return number


def one_of(*choices: str) -> Callable[[Any], str]:
    """A reader of words."""

    def read(raw: Any) -> str:
        if not isinstance(raw, str) or raw not in choices:
            raise ValueError(f"not one of {', '.join(choices)}")
        return raw

    return read


def to_path(raw: Any) -> Path:
    """An absolute path; ``~`` is somebody's home."""
    text = os.fspath(raw) if isinstance(raw, (str, os.PathLike)) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ValueError("not a path")
    path = os.path.expanduser(text)
    if path.startswith("~"):
        raise ValueError("nobody's home (write ./~ for a folder of that name)")
    return Path(os.path.abspath(path))


def to_bool(raw: Any) -> bool:
    """A switch: ``true yes on 1`` or ``false no off 0``."""
    if isinstance(raw, bool):
        return raw
    text = str(raw).strip().lower()
    if text in {"1", "true", "yes", "on"}:
        return True
    if text in {"0", "false", "no", "off"}:
        return False
    raise ValueError("neither true nor false")


def is_key(text: str) -> bool:
    """Whether this is the base64 form of a key of 256 bits."""
    try:
        return len(base64.b64decode(text, validate=True)) == 32
    except ValueError:
        return False
