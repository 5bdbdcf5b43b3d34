"""What a URL on the command line selects: one object, a folder (``/`` at the end), or a pattern with ``*``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import ConfigError
from .objstore.url import ObjectUrl, parse_url


@dataclass(frozen=True)
class Selection:
    """``folder`` is where to list (``None`` for a single object); ``pattern`` what full URLs must match."""

    text: str
    folder: str | None
    pattern: re.Pattern[str]

    def matches(self, url: str) -> bool:
        return self.pattern.fullmatch(url) is not None


def select(text: str) -> Selection:
    """Read one URL. ``*`` stands for any characters but ``/``, ``**`` for any at all.

    Raises :class:`ConfigError` for a local path, which needs no cache.
    """
    target = parse_url(text)
    if target.is_local:
        raise ConfigError("is a local path, which needs no cache", url=text, hint="give s3://bucket/key")
    if "*" in target.key:
        fixed = target.key.partition("*")[0].rpartition("/")[0]
        return Selection(text, _folder(target, fixed), re.compile(_translate(str(target)), re.DOTALL))
    if not target.key or target.key.endswith("/"):
        return Selection(text, str(target), re.compile(re.escape(str(target)) + ".*", re.DOTALL))
    return Selection(text, None, re.compile(re.escape(str(target))))


def _folder(target: ObjectUrl, key: str) -> str:
    return str(target.with_key(key + "/" if key else ""))


def _translate(pattern: str) -> str:
    parts = re.split(r"(\*+)", pattern)
    return "".join({"*": "[^/]*"}.get(p, ".*") if p.startswith("*") else re.escape(p) for p in parts)
