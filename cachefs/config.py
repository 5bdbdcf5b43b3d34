"""Settings: one frozen object, and the only reader of ``os.environ`` and of ``nearflash.toml``.

Arguments win over the environment, the environment over ``nearflash.toml`` (``NEARFLASH_CONFIG``, else
``./nearflash.toml``, else ``~/.config/nearflash.toml``), that over the defaults. The stores' own variables
(``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL`` ...) are read here too and become an :class:`Origin`.
"""

from __future__ import annotations

import difflib
import os
import tempfile
import tomllib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from .cloudvars import belongs_to_a_client, carried
from .errors import ConfigError
from .hashing import name_digest
from .redaction import redact
from .values import at_least, is_key, one_of, optional_size, parse_size, seconds, to_bool, to_path, to_share, to_weight

T = TypeVar("T")

MIB = 1 << 20
CHUNK_ALIGN = 64 * 1024
"""Chunk sizes are multiples of this, so that no page of any architecture straddles two chunks."""


@dataclass(frozen=True)
class Origin:
    """How to reach an object store: endpoint, region, and where the credentials come from.

    A client sends its own to the daemon, which keeps one store client per distinct value. The secret parts never
    appear in ``repr`` and are never logged.

    ``preset`` names a cloud (``aws``, ``aliyun``, ``minio``, ...) and fixes the addressing style; ``addressing`` is
    ``"auto" | "path" | "virtual"``. ``backend`` is ``"auto" | "obstore" | "fsspec"``. ``extra`` maps variables of the
    other clouds (``AZURE_STORAGE_ACCOUNT_NAME``, ``GOOGLE_SERVICE_ACCOUNT`` ...) and of proxies to values, as pairs
    sorted by name.

    ``proxy`` is the URL of an HTTP proxy, or ``"none"`` to use none whatever the environment says; ``ca_bundle`` the
    path of a PEM file with certificates to trust besides the system's. ``requester_pays``: this account pays for what
    it reads of others' buckets. ``sse_customer_key``: base64 of the 32 bytes with which an S3 store encrypts and
    decrypts objects (SSE-C).
    """

    endpoint: str | None = None
    region: str | None = None
    preset: str | None = None
    addressing: str = "auto"
    profile: str | None = None
    anonymous: bool = False
    backend: str = "auto"
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    extra: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    proxy: str | None = field(default=None, repr=False)
    ca_bundle: str | None = None
    requester_pays: bool = False
    sse_customer_key: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.sse_customer_key is not None and not is_key(self.sse_customer_key):
            what = "the SSE customer key is not the base64 form of 32 bytes"
            raise ConfigError(what, hint="openssl rand -base64 32 makes one")
        endpoint = self.endpoint or ""
        if redact(endpoint) != endpoint:
            what = "an endpoint holds no user name, password or query"
            raise ConfigError(what, url=endpoint, hint="keys have variables of their own, AWS_ACCESS_KEY_ID ...")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Origin:
        """The origin that the stores' own environment variables describe."""
        env = os.environ if environ is None else environ
        return cls(
            endpoint=env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL") or env.get("AWS_ENDPOINT") or None,
            region=env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or None,
            preset=env.get("NEARFLASH_PRESET") or None,
            addressing=env.get("NEARFLASH_ADDRESSING") or "auto",
            profile=env.get("AWS_PROFILE") or None,
            anonymous=_read(to_bool, env.get("NEARFLASH_ANONYMOUS") or False, "NEARFLASH_ANONYMOUS"),
            backend=env.get("NEARFLASH_BACKEND") or "auto",
            access_key_id=env.get("AWS_ACCESS_KEY_ID") or None,
            secret_access_key=env.get("AWS_SECRET_ACCESS_KEY") or None,
            session_token=env.get("AWS_SESSION_TOKEN") or None,
            extra=carried(env),
            proxy=env.get("NEARFLASH_PROXY") or None,
            ca_bundle=env.get("NEARFLASH_CA_BUNDLE") or env.get("AWS_CA_BUNDLE") or None,
            requester_pays=_read(to_bool, env.get("NEARFLASH_REQUESTER_PAYS") or False, "NEARFLASH_REQUESTER_PAYS"),
            sse_customer_key=env.get("NEARFLASH_SSE_CUSTOMER_KEY") or None,
        )

    def identity(self) -> str:
        """A digest over all of it, secrets included: the key under which a store client is kept. Not reversible."""
        return name_digest(*(f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)))


@dataclass(frozen=True)
class Settings:
    """All settings of a node's cache. Sizes are bytes, times seconds.

    ``quota`` is the most disk space the cache may take (``None``: 80 % of what is free when the daemon starts, own
    entries included). ``socket`` defaults to a short path in the user's runtime directory derived from ``cache_dir``.
    """

    cache_dir: Path
    socket: Path
    quota: int | None = None
    free_floor: int = 0
    chunk_size: int = 8 * MIB
    transfer_bytes: int = 128 * MIB
    """Budget for bytes in flight between origin and disk; bounds the daemon's memory and its parallel requests."""
    origin_parallel: int = 16
    """Most requests to one bucket at a time."""
    stall_timeout: float = 20.0
    """A read that gets no byte for this long is cut and retried."""
    hedge_share: float = 0.05
    """Most second requests for reads that are late, as a part of all reads; 0 for none."""
    request_deadline: float = 300.0
    """One chunk, with all its retries, ends by then in bytes or an error."""
    connect_timeout: float = 30.0
    """A client waits this long for a daemon to answer or to start."""
    idle_timeout: float = 900.0
    """A daemon started by a client exits after this long without client; 0 never."""
    autostart: bool = True
    """Whether a client may start the daemon."""
    passthrough_bytes: int | None = None
    """Most bytes of one object that a process keeps in its memory because the cache cannot take it (``None``: half of
    the memory that is available at that moment, at most 16 GiB)."""
    eviction: str = "s3fifo"
    """What goes first where no job declared a plan: "s3fifo", or "lru" for the least recently used."""
    job_share: float = 1.0
    """This job's part of the cache beside other jobs that declare plans: its share of the sum of all."""
    plans: bool = True
    """Whether what will be read is declared to the daemon; otherwise data sets ask for what comes next."""
    origin: Origin = field(default_factory=Origin)

    def __post_init__(self) -> None:
        for name in _READERS:
            object.__setattr__(self, name, _setting(name, getattr(self, name), name))
        if not isinstance(self.origin, Origin):
            raise ConfigError("origin is not an Origin", hint="cachefs.Origin(endpoint=..., ...)")
        if self.chunk_size <= 0 or self.chunk_size % CHUNK_ALIGN:
            raise ConfigError(f"chunk_size {self.chunk_size} is not a positive multiple of {CHUNK_ALIGN}")
        if self.transfer_bytes < self.chunk_size:
            raise ConfigError(f"transfer_bytes {self.transfer_bytes} is less than chunk_size {self.chunk_size}")

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Settings:
        """Settings from arguments, environment and ``nearflash.toml``, in that order of precedence.

        ``overrides`` that are ``None`` count as not given. Raises :class:`ConfigError` for a value that cannot be
        read, naming the variable or file it came from. A variable ``NEARFLASH_...`` that is no setting is a warning.
        """
        env = dict(os.environ if environ is None else environ)
        _warn_of_unknown(env)
        values: dict[str, Any] = {}
        file, lines = _read_toml(env)
        for name, raw in lines.items():
            values[name] = _setting(name, raw, f"{file}: {name}")
        for name in _READERS:
            variable = f"NEARFLASH_{name.upper()}"
            if env.get(variable):
                values[name] = _setting(name, env[variable], variable)
        for name, raw in overrides.items():
            if raw is not None:
                values[name] = raw if name == "origin" else _setting(name, raw, name)
        if "origin" not in values:
            values["origin"] = Origin.from_env(env)
        if "cache_dir" not in values:
            values["cache_dir"] = to_path(_default_cache_dir(env))
        if "socket" not in values:
            values["socket"] = default_socket(values["cache_dir"], env)
        return cls(**values)

    def with_(self, **changes: Any) -> Settings:
        """A copy with some settings changed, read and checked as those of :meth:`load`.

        Another ``cache_dir`` has another daemon: a socket that was derived from the directory is derived anew.
        """
        for name, raw in changes.items():
            if name != "origin":
                changes[name] = _setting(name, raw, name)
        if "cache_dir" in changes and "socket" not in changes and self.socket.name == _socket_name(self.cache_dir):
            changes["socket"] = self.socket.with_name(_socket_name(changes["cache_dir"]))
        return replace(self, **changes)


def default_socket(cache_dir: Path, environ: Mapping[str, str]) -> Path:
    """A short socket path (``sun_path`` holds 107 bytes) that only depends on the cache directory and the user."""
    runtime = environ.get("XDG_RUNTIME_DIR")
    uid = os.getuid() if hasattr(os, "getuid") else 0
    base = Path(runtime) / "nearflash" if runtime else Path(tempfile.gettempdir()) / f"nearflash-{uid}"
    if len(os.fsencode(base)) > 60:
        base = Path("/tmp") / f"nearflash-{uid}"
    return base / _socket_name(cache_dir)


def _socket_name(cache_dir: Path) -> str:
    return f"{name_digest(os.path.realpath(cache_dir))[:16]}.sock"


def job_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the launcher tells of this job (torchrun's and Slurm's own variables, and where ranks meet), for names that
    people recognise."""
    env = os.environ if environ is None else environ
    return {name: value for name, value in env.items() if name.startswith(("TORCHELASTIC_", "SLURM_", "MASTER_"))}


def rank_environment(environ: Mapping[str, str] | None = None) -> tuple[str, str] | None:
    """``RANK`` and ``WORLD_SIZE`` as the launcher set them, unread; ``None`` without both."""
    env = os.environ if environ is None else environ
    rank, world = env.get("RANK"), env.get("WORLD_SIZE")
    return (rank, world) if rank and world else None


def launcher_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """What the launcher tells *all* ranks alike of how many they are and on how many nodes; unread."""
    env = os.environ if environ is None else environ
    return {name: env[name] for name in _SAME_ON_ALL_RANKS if env.get(name)}


def debugging(environ: Mapping[str, str] | None = None) -> bool:
    """Whether ``NEARFLASH_DEBUG`` asks a command for the traceback of an error."""
    env = os.environ if environ is None else environ
    return env.get("NEARFLASH_DEBUG", "") not in ("", "0")


def environment() -> dict[str, str]:
    """A copy of this process's environment, for another one that is started."""
    return dict(os.environ)


_SAME_ON_ALL_RANKS = (
    "WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NUM_NODES",
    "SLURM_DISTRIBUTION",
)


def _default_cache_dir(env: Mapping[str, str]) -> Path:
    base = env.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path(env.get("HOME") or Path.home()) / ".cache") / "nearflash"


_READERS: dict[str, Callable[[Any], Any]] = {
    "cache_dir": to_path,
    "socket": to_path,
    "quota": optional_size,
    "free_floor": parse_size,
    "chunk_size": parse_size,
    "transfer_bytes": parse_size,
    "origin_parallel": at_least(1),
    "hedge_share": to_share,
    "stall_timeout": seconds(zero=False),
    "request_deadline": seconds(zero=False),
    "connect_timeout": seconds(zero=True),
    "idle_timeout": seconds(zero=True),
    "autostart": to_bool,
    "passthrough_bytes": optional_size,
    "eviction": one_of("s3fifo", "lru"),
    "job_share": to_weight,
    "plans": to_bool,
}


_OTHER_VARIABLES = (
    "CONFIG",
    "DEBUG",
    "PRESET",
    "ADDRESSING",
    "ANONYMOUS",
    "BACKEND",
    "PROXY",
    "CA_BUNDLE",
    "REQUESTER_PAYS",
    "SSE_CUSTOMER_KEY",
)
_OF_OTHER_PROGRAMS = tuple(f"NEARFLASH_{name}_" for name in ("TEST", "DEMO", "BENCH"))


def _warn_of_unknown(env: Mapping[str, str]) -> None:
    """A misspelt variable would be as if it were not there. Python's own filter says each warning once."""
    known = [f"NEARFLASH_{name.upper()}" for name in (*_READERS, *_OTHER_VARIABLES)]
    for name in env:
        if name.startswith("NEARFLASH_") and name not in known and not name.startswith(_OF_OTHER_PROGRAMS):
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"perhaps {near[0]} is meant" if near else "docs/settings.md lists those there are"
            warnings.warn(f"the environment variable {name} is no setting of nearflash ({hint})", stacklevel=3)


def _setting(name: str, raw: Any, source: str) -> Any:
    if name not in _READERS:
        raise ConfigError(f"{source} is not a setting", hint=f"known: {', '.join(sorted(_READERS))}")
    return _read(_READERS[name], raw, source)


def _read(reader: Callable[[Any], T], raw: Any, source: str) -> T:
    try:
        return reader(raw)
    except ValueError as e:
        raise ConfigError(f"{source}={raw!r} cannot be read: {e}") from e


def _read_toml(env: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The file's name for messages, and what it says."""
    explicit = env.get("NEARFLASH_CONFIG")
    home = env.get("HOME")
    candidates = [Path(explicit)] if explicit else [Path("nearflash.toml")]
    if not explicit and home:
        candidates.append(Path(home) / ".config" / "nearflash.toml")
    for path in candidates:
        try:
            with open(path, "rb") as f:
                return (str(path) if explicit else path.name), tomllib.load(f)
        except FileNotFoundError:
            if explicit:
                raise ConfigError("NEARFLASH_CONFIG names a file that does not exist", url=str(path)) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as e:
            raise ConfigError(f"cannot be read: {e}", url=str(path)) from e
    return "", {}


def forget_client_variables() -> None:
    """Remove one client's accounts, keys and endpoints from this process's environment: for one that serves many."""
    for name in filter(belongs_to_a_client, list(os.environ)):
        del os.environ[name]
