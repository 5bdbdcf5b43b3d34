"""New credentials, asked for once however many requests find the old ones refused."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable


class Renewal:
    """``renew`` looks for other credentials and tells whether there are any. Belongs to one event loop."""

    def __init__(self, renew: Callable[[], Awaitable[bool]]) -> None:
        self._renew = renew
        self._lock = asyncio.Lock()
        self._attempts = 0
        self._found = False

    @property
    def attempts(self) -> int:
        """How often credentials were looked for; a request remembers it when it begins."""
        return self._attempts

    async def since(self, attempts: int) -> bool:
        """Whether there are other credentials than when a request began, at ``attempts``; looks for them if need be.

        Raises :class:`Denied` when there are none left at all.
        """
        async with self._lock:
            if self._attempts == attempts:
                self._attempts += 1
                self._found = False
                self._found = await self._renew()
            return self._found
