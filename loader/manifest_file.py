"""A manifest kept as a file: a data set that is opened without listing, counting or reading an index again.

The file is a magic number, the XXH3-128 digest of what follows, and the manifest as msgpack. It names every shard with
the version that was seen, so a shard that was replaced since is ``Changed`` when it is opened; shards that were added
since are not in it: write it anew then.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import TYPE_CHECKING

import xxhash

from cachefs.errors import ConfigError, FormatError
from cachefs.objstore.url import parse_url

from .manifest import Manifest

if TYPE_CHECKING:
    from .formats import Format
    from .formats.derived import View

SUFFIX = ".manifest"
"""What the name of such a file has to end with where it is given as a data set's source."""
_MAGIC = b"nearflash manifest 1\n"
_DIGEST = 16


def save_manifest(manifest: Manifest, path: str | os.PathLike[str]) -> None:
    """Write ``manifest`` to a local file whose name ends with :data:`SUFFIX`; it is there whole or not at all."""
    target = os.fspath(path)
    if not target.endswith(SUFFIX):
        raise FormatError("the name of a manifest file has to end with .manifest", url=target)
    body = manifest.to_bytes()
    folder = os.path.dirname(target) or "."
    fd, temporary = tempfile.mkstemp(prefix=".manifest-", dir=folder)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(_MAGIC + xxhash.xxh3_128_digest(body) + body)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # as readable as the data set it describes
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def parse_manifest(raw: bytes, url: str, format: Format | None = None, views: Sequence[View] = ()) -> Manifest:
    """The manifest in a file's bytes. Raises ``FormatError`` for a damaged file or another one, ``ConfigError`` where
    its samples are not those that ``views`` lead to."""
    if not raw.startswith(_MAGIC):
        raise FormatError("not a manifest file", url=url, offset=0)
    at = len(_MAGIC)
    body = raw[at + _DIGEST :]
    if xxhash.xxh3_128_digest(body) != raw[at : at + _DIGEST]:
        raise FormatError("the manifest is damaged: its digest is not that of its bytes", url=url, offset=at)
    try:
        manifest = Manifest.from_bytes(body, format, views)
    except ConfigError as e:
        raise ConfigError(e.what, url=url, hint=e.hint) from e
    except ValueError as e:
        raise FormatError(f"a manifest of another version: {e}", url=url, offset=at) from e
    if not parse_url(url).is_local:
        local = next((stat.url for stat in manifest.shards if parse_url(stat.url).is_local), None)
        if local is not None:
            raise FormatError(f"a manifest in a store that names the local file {local}", url=url, offset=at)
    return manifest
