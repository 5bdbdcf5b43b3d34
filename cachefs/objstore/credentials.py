"""Where the keys for an S3 origin come from.

In this order: the origin's own keys (arguments, or ``AWS_ACCESS_KEY_ID`` in the environment that made it); none, when
it is anonymous; else botocore's provider chain: profile, web identity, SSO, credentials file, ``credential_process``,
container, instance metadata; not this process's own ``AWS_ACCESS_KEY_ID`` and ``AWS_PROFILE``, since a daemon works for
clients with other ones. That chain renews what it gives by itself; files that it read are read again when they change.
It bounds the question to the instance metadata service to two seconds, so a machine without any credentials gets its
error soon.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from ..config import Origin
from ..errors import Denied
from .replies import credential_hint, shorten

_RENEWED_FOR = timedelta(minutes=5)
"""How long obstore is told that keys last. It asks anew when less than five minutes are left, at most ten times a
second, so this is how often files are looked at while requests are made."""

_Stamp = tuple[tuple[int, int, int] | None, ...]


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
        self._fixed: Keys | None = None
        if origin.access_key_id and origin.secret_access_key:
            self._fixed = Keys(origin.access_key_id, origin.secret_access_key, origin.session_token)
        self._lock = threading.Lock()
        self._chain: Any = None
        self._files: tuple[str, ...] = ()
        self._stamp: _Stamp = ()

    @property
    def anonymous(self) -> bool:
        """Requests are not signed at all."""
        return self._origin.anonymous

    def keys(self, url: str) -> Keys:
        """The keys of this moment. Raises :class:`Denied`, naming ``url`` and the way out, when there are none."""
        if self._fixed is not None:
            return self._fixed
        from botocore.exceptions import BotoCoreError

        try:
            with self._lock:
                self._look_up_if_needed()
                frozen = self._chain.get_frozen_credentials() if self._chain is not None else None
        except BotoCoreError as e:
            raise Denied(
                f"the credentials cannot be read: {shorten(str(e))}", url=url, hint=credential_hint(url)
            ) from e
        if frozen is None or not frozen.access_key or not frozen.secret_key:
            raise Denied("no credentials found", url=url, hint=credential_hint(url))
        return Keys(frozen.access_key, frozen.secret_key, frozen.token, renewable=True)

    def renew(self, url: str) -> bool:
        """Ask all sources anew, since a store refused what they gave; ``False`` where keys are fixed or not needed.

        The keys may turn out to be the same: a store may also need a moment to know new ones. Raises :class:`Denied`
        when there are none any more.
        """
        if self.anonymous or self._fixed is not None:
            return False
        with self._lock:
            self._chain = None
        self.keys(url)
        return True

    def _look_up_if_needed(self) -> None:
        from botocore.exceptions import BotoCoreError

        if self._chain is None:
            self._look_up()
        elif _stamp_of(self._files) != self._stamp:
            try:
                self._look_up()
            except BotoCoreError:
                # Somebody is writing a file; what it said before still counts, and its next change is seen again.
                return

    def _look_up(self) -> None:
        """Set the chain up anew, and remember which files it may have read, as they were before."""
        from botocore.session import Session

        # As botocore has them, but for the environment variables: (name in the file, variables, default, conversion).
        named = {"profile": (None, None, None, None), "region": ("region", None, self._origin.region, None)}
        session = Session(session_vars=named, profile=self._origin.profile)
        if self._origin.profile is None:  # with one, the chain leaves it out by itself
            session.get_component("credential_provider").remove("env")
        session.set_config_variable("metadata_service_timeout", 1)
        session.set_config_variable("metadata_service_num_attempts", 1)
        names = (session.get_config_variable(name) for name in ("credentials_file", "config_file"))
        self._files = tuple(os.path.expanduser(name) for name in names)
        self._stamp = _stamp_of(self._files)
        found = session.get_credentials()
        if found is not None or self._chain is None:
            self._chain = found


def _stamp_of(files: tuple[str, ...]) -> _Stamp:
    """What changes when a file is written, replaced, made or removed."""
    return tuple(_file_stamp(name) for name in files)


def _file_stamp(name: str) -> tuple[int, int, int] | None:
    try:
        found = os.stat(name)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


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
