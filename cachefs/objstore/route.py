"""Sends each key to a backend that reads it under its own name.

object_store (under obstore) takes keys for paths. What it would refuse or rewrite goes to the exact backend, which
passes keys on as they stand: on S3 that is s3fs, elsewhere the scheme's fsspec file system.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .abc import Listing, ObjectMeta, ObjectStore

if TYPE_CHECKING:
    from typing_extensions import Buffer

_UNFIT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


def is_plain(key: str) -> bool:
    """Whether object_store takes this key as it stands.

    Not so: empty, ``.`` and ``..`` segments, hence also a slash at either end, ASCII control characters, and
    names that are no Unicode (which Python writes with surrogates).
    """
    return _UNFIT.search(key) is None and all(part not in {"", ".", ".."} for part in key.split("/"))


def is_plain_file(key: str) -> bool:
    """The same for an absolute local path; object_store keeps names that end in ``#`` and digits to itself."""
    return key.startswith("/") and is_plain(key[1:]) and re.search(r"#\d+$", key) is None


def is_plain_url(key: str) -> bool:
    """The same for the path of an ``http(s)`` URL, where a query belongs to the key."""
    return "?" not in key and "#" not in key and is_plain(key)


class RoutedStore(ObjectStore):
    """Two backends of one bucket: ``fast`` for keys that ``plain`` approves, ``exact`` for all others.

    ``exact`` is made when first needed; ``None`` where there is no such backend, and then such a key is a
    :class:`ConfigError`. ``exact_lists``: listings come from it too, since only it gives every name as it is.
    Owns both.
    """

    def __init__(
        self,
        fast: ObjectStore,
        exact: Callable[[], ObjectStore] | None,
        *,
        plain: Callable[[str], bool] = is_plain,
        exact_lists: bool,
    ) -> None:
        self.url = fast.url
        self._fast = fast
        self._make_exact = exact
        self._exact: ObjectStore | None = None
        self._plain = plain
        self._exact_lists = exact_lists

    async def head(self, key: str) -> ObjectMeta:
        return await self._for(key).head(key)

    async def get_range(self, key: str, start: int, end: int, *, version: ObjectMeta | None = None) -> Buffer:
        return await self._for(key).get_range(key, start, end, version=version)

    async def get(self, key: str) -> tuple[ObjectMeta, Buffer]:
        return await self._for(key).get(key)

    async def list_page(
        self, prefix: str, *, delimiter: bool = False, token: str | None = None
    ) -> tuple[Listing, str | None]:
        store = self._open_exact(prefix) if self._exact_lists else self._fast
        return await store.list_page(prefix, delimiter=delimiter, token=token)

    async def put(
        self, key: str, data: Buffer | Sequence[Buffer], *, if_none_match: bool = False, if_match: str | None = None
    ) -> ObjectMeta:
        return await self._for(key).put(key, data, if_none_match=if_none_match, if_match=if_match)

    async def put_multipart(self, key: str, parts: AsyncIterator[Buffer], *, concurrency: int = 4) -> ObjectMeta:
        return await self._for(key).put_multipart(key, parts, concurrency=concurrency)

    async def delete(self, keys: Sequence[str]) -> None:
        plain = [key for key in keys if self._plain(key)]
        odd = [key for key in keys if not self._plain(key)]
        if plain:
            await self._fast.delete(plain)
        if odd:
            await self._open_exact(odd[0]).delete(odd)

    async def renew(self) -> bool:
        renewed = await self._fast.renew()
        if self._exact is not None:
            renewed = await self._exact.renew() or renewed
        return renewed

    async def close(self) -> None:
        exact, self._exact = self._exact, None
        try:
            await self._fast.close()
        finally:
            if exact is not None:
                await exact.close()

    def _for(self, key: str) -> ObjectStore:
        return self._fast if self._plain(key) else self._open_exact(key)

    def _open_exact(self, key: str) -> ObjectStore:
        if self._exact is None:
            if self._make_exact is None:
                raise ConfigError(
                    f"this kind of store cannot hold the key {key!r}",
                    url=self.url,
                    hint="no empty, '.' or '..' segments, control characters, or slash at an end",
                )
            self._exact = self._make_exact()
        return self._exact
