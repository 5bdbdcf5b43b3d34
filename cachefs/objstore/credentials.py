"""Where the keys for an S3 origin come from.

In this order: the origin's own keys (arguments, or ``AWS_ACCESS_KEY_ID`` in the environment that made it); none, when
it is anonymous; else botocore's provider chain: profile, web identity, SSO, credentials file, ``credential_process``,
container, instance metadata; not this process's own ``AWS_ACCESS_KEY_ID`` and ``AWS_PROFILE``, since a daemon works for
clients with other ones. That chain renews what it gives by itself. It bounds the question to the instance metadata
service to two seconds, so a machine without any credentials gets its error soon.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ..config import Origin
from ..errors import Denied
from .replies import credential_hint, shorten

_RENEWED_FOR = timedelta(minutes=5)


@dataclass(frozen=True)
class Keys:
    """One set of S3 keys. ``renewable``: the chain may give others later, so nobody should hold them for long."""

    access_key_id: str = field(repr=False)
    secret_access_key: str = field(repr=False)
    session_token: str | None = field(default=None, repr=False)
    renewable: bool = False


class CredentialSource:
    """The keys of one origin, looked up when first needed. Thread-safe; calls may block on files and the network."""

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._lock = threading.Lock()
        self._chain: Any = None

    @property
    def anonymous(self) -> bool:
        """Requests are not signed at all."""
        return self._origin.anonymous

    def keys(self, url: str) -> Keys:
        """The keys of this moment. Raises :class:`Denied`, naming ``url`` and the way out, when there are none."""
        origin = self._origin
        if origin.access_key_id and origin.secret_access_key:
            return Keys(origin.access_key_id, origin.secret_access_key, origin.session_token)
        from botocore.exceptions import BotoCoreError

        try:
            with self._lock:
                if self._chain is None:
                    self._chain = self._look_up()
                frozen = self._chain.get_frozen_credentials() if self._chain is not None else None
        except BotoCoreError as e:
            raise Denied(
                f"the credentials cannot be read: {shorten(str(e))}", url=url, hint=credential_hint(url)
            ) from e
        if frozen is None or not frozen.access_key or not frozen.secret_key:
            raise Denied("no credentials found", url=url, hint=credential_hint(url))
        return Keys(frozen.access_key, frozen.secret_key, frozen.token, renewable=True)

    def forget(self) -> None:
        """Read the chain's sources anew at the next call: what it gave is no longer accepted."""
        with self._lock:
            self._chain = None

    def _look_up(self) -> Any:
        from botocore.session import Session

        # As botocore has them, but for the environment variables: (name in the file, variables, default, conversion).
        named = {"profile": (None, None, None, None), "region": ("region", None, self._origin.region, None)}
        session = Session(session_vars=named, profile=self._origin.profile)
        if self._origin.profile is None:  # with one, the chain leaves it out by itself
            session.get_component("credential_provider").remove("env")
        session.set_config_variable("metadata_service_timeout", 1)
        session.set_config_variable("metadata_service_num_attempts", 1)
        return session.get_credentials()


class ObstoreProvider:
    """What obstore calls when it needs keys; a plain function to it, on a thread of its own."""

    def __init__(self, source: CredentialSource, url: str) -> None:
        self._source = source
        self._url = url

    def __call__(self) -> dict[str, Any]:
        keys = self._source.keys(self._url)
        return {
            "access_key_id": keys.access_key_id,
            "secret_access_key": keys.secret_access_key,
            "token": keys.session_token,
            "expires_at": datetime.now(UTC) + _RENEWED_FOR if keys.renewable else None,
        }
