"""What may be attached to a cached object: the rules that clients, daemon and flash store share."""

from __future__ import annotations

import re

from .errors import ConfigError

MOST_BYTES = 64 << 20
"""Of one attachment; a larger one is not kept."""
MOST_PER_ENTRY = 8
"""Of one object; a further one takes the place of the oldest."""
_NAME = re.compile(r"[a-z0-9.-]{1,64}")


def check_name(name: str, url: str | None = None) -> str:
    """The name itself. Raises :class:`ConfigError` unless it is 1 to 64 characters of ``a-z 0-9 . -``."""
    if not _NAME.fullmatch(name):
        what = f"{name[:80]!r} is not the name of an attachment"
        raise ConfigError(what, url=url, hint="1 to 64 characters of a-z, 0-9, '.' and '-'")
    return name
