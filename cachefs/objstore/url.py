"""Object URLs: ``scheme://bucket/key`` where the key is taken as it stands.

A key is bytes, not a path: nothing is decoded, normalised or joined. ``s3://b/a%20b`` is the key ``a%20b``,
``s3://b//x`` the key ``/x``, and ``?`` and ``#`` are ordinary characters.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from urllib.parse import unquote

from ..errors import ConfigError

LOCAL_SCHEMES = frozenset({"", "file"})
_ONE_SLASH = re.compile(r"(s3|s3a|gs|gcs|az|abfs|abfss|https?):/*(.*)", re.IGNORECASE | re.DOTALL)
MOST_URL_BYTES = 4096
"""No store has keys of more than 1,024 bytes; presigned http URLs are longer."""


@dataclass(frozen=True, order=True)
class ObjectUrl:
    """One object, or a prefix of many. ``bucket`` is empty for schemes without one (``file``)."""

    scheme: str
    bucket: str
    key: str

    @property
    def root(self) -> str:
        """What a store client is made for: scheme and bucket, without key."""
        return f"{self.scheme}://{self.bucket}"

    @property
    def is_local(self) -> bool:
        return self.scheme in LOCAL_SCHEMES

    def with_key(self, key: str) -> ObjectUrl:
        return ObjectUrl(self.scheme, self.bucket, key)

    def __str__(self) -> str:
        return self.key if self.scheme == "" else f"{self.scheme}://{self.bucket}/{self.key}"


def parse_url(text: str | os.PathLike[str]) -> ObjectUrl:
    """Split a URL or a local path. Local paths and ``file://`` give scheme ``file`` and an absolute path as key; a
    path's ``~`` is somebody's home.

    Raises :class:`ConfigError` where a bucket is missing, or for a URL longer than :data:`MOST_URL_BYTES`.
    """
    raw = os.fspath(text)
    if not raw:
        raise ConfigError("an empty URL", hint="give s3://bucket/key or a path")
    scheme, sep, rest = raw.partition("://")
    if not sep or not scheme.replace("+", "").replace("-", "").isalnum():
        slip = _ONE_SLASH.match(raw)
        if slip is not None and not os.path.lexists(raw):
            hint = f"write {slip[1].lower()}://{slip[2]}, or ./{raw} for a path"
            raise ConfigError("a path that looks like a URL", url=raw, hint=hint)
        return ObjectUrl("file", "", os.path.abspath(os.path.expanduser(raw)))
    scheme = scheme.lower()
    if scheme == "file":
        path = unquote(rest.removeprefix("localhost"))
        return ObjectUrl("file", "", os.path.abspath(path))
    length = len(raw.encode(errors="surrogatepass"))
    if length > MOST_URL_BYTES:
        raise ConfigError(f"a URL of {length} bytes; at most {MOST_URL_BYTES} are taken", url=f"{raw[:80]}\u2026")
    bucket, _, key = rest.partition("/")
    if not bucket and scheme != "memory":
        raise ConfigError("no bucket in the URL", url=raw, hint=f"write {scheme}://bucket/key")
    return ObjectUrl(scheme, bucket, key)
