"""Makes the daemon's store clients."""

from __future__ import annotations

from ..clock import Clock
from ..config import Origin, Settings
from ..metrics import Metrics
from ..objstore import open_store
from ..objstore.abc import ObjectStore
from ..objstore.limiter import Limiter
from ..objstore.url import ObjectUrl


class StoreOpener:
    """Opens stores; those of one bucket share one limit on requests, whoever's credentials they use."""

    def __init__(self, settings: Settings, *, metrics: Metrics, clock: Clock) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._limiters: dict[tuple[str, str | None], Limiter] = {}

    def __call__(self, url: ObjectUrl, origin: Origin) -> ObjectStore:
        limiter = self._limiters.setdefault((url.root, origin.endpoint), Limiter(self._settings.origin_parallel))
        return open_store(
            url, origin, settings=self._settings, metrics=self._metrics, clock=self._clock, limiter=limiter
        )
