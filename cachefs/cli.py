"""The ``cachefs`` command. Errors are one line on standard error; ``--json`` prints one JSON value on standard output.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted. Commands import what they need, so ``--help`` is quick.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from .commandline import fail, given_origin, json_option, origin_options, plain, run
from .errors import CacheError, ConfigError, DaemonUnavailable, NearflashError

if TYPE_CHECKING:
    from .client import Client
    from .config import Settings

F = TypeVar("F", bound=Callable[..., Any])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return run(cli, "cachefs", argv)


def _place(command: F) -> F:
    return click.option("--cache-dir", help="Cache directory [env NEARFLASH_CACHE_DIR].")(command)


def _client(cache_dir: str | None, *, autostart: bool | None = None, **origin: Any) -> Client:
    import logging

    from .client import connect
    from .config import Settings

    logging.getLogger("cachefs").addHandler(logging.NullHandler())  # warnings become the command's own output
    logging.getLogger("cachefs").propagate = False
    return connect(Settings.load(cache_dir=cache_dir, autostart=autostart, origin=given_origin(origin)))


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="nearflash", prog_name="cachefs")
def cli() -> None:
    """A cache of object-store data on this node's local disk."""


@cli.command()
@_place
@click.option("--quota", help="Most disk space to take, such as 500GB [env NEARFLASH_QUOTA].")
@click.option("--idle-timeout", type=float, help="End after this many seconds without clients (default: never).")
@click.option("--foreground", is_flag=True, help="Serve in this process and log to standard error.")
@click.option("--report-fd", type=int, hidden=True)
@json_option
def daemon(
    cache_dir: str | None,
    quota: str | None,
    idle_timeout: float | None,
    foreground: bool,
    report_fd: int | None,
    as_json: bool,
) -> None:
    """Serve this node's cache. Clients start a daemon by themselves; this one does not end when idle."""
    from .config import Settings

    if report_fd is not None:
        _serve_detached(Settings.load(cache_dir=cache_dir), report_fd)
    settings = Settings.load(cache_dir=cache_dir, quota=quota, idle_timeout=idle_timeout or 0.0)
    if foreground:
        _serve(settings, None)
    from .launch import start_daemon

    started = start_daemon(settings, timeout=settings.connect_timeout)
    with _client(str(settings.cache_dir), autostart=False) as client:
        stats = client.stats()
    asked = {"quota_bytes": quota and settings.quota, "idle_timeout_seconds": idle_timeout}
    other = [name for name, value in asked.items() if value is not None and stats.get(name) != value]
    if started.already and other:
        raise _already(settings, started.pid, f"; its {' and '.join(other)} cannot be changed")
    if started.already and not as_json:
        click.echo(f"already running, pid {started.pid}")
    shown: dict[str, Any] = {name: stats[name] for name in ("cache_dir", "pid", "quota_bytes") if name in stats}
    if as_json:
        shown["already_running"] = started.already
    _show(shown, as_json)


def _already(settings: Settings, pid: int, more: str = "") -> CacheError:
    return CacheError(
        f"a daemon serves already, pid {pid}{more}", url=str(settings.cache_dir), hint="cachefs stop ends it"
    )


def _serve_detached(settings: Settings, report_fd: int) -> NoReturn:
    """The process that a client started: leave it behind as nobody's child, then serve."""
    if os.fork():
        os._exit(0)
    _serve(settings, report_fd)


def _serve(settings: Settings, report_fd: int | None) -> NoReturn:
    """Be the daemon and end. With ``report_fd`` for the one who waits there, else for whoever reads standard error."""
    from .config import forget_client_variables
    from .daemon.lifecycle import run
    from .launch import Started, write_report

    forget_client_variables()  # a client that sends no key or endpoint shall not get those of whoever started us

    def ready(report: Started) -> None:
        if report_fd is not None:
            write_report(report_fd, report)
        elif report.already:
            raise _already(settings, report.pid)

    code = 0
    try:
        run(settings, ready, echo=report_fd is None)
    except NearflashError as e:
        code = fail("cachefs", str(e), 1)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads may hang in a dead disk's system calls; a normal exit would wait for them


@cli.command()
@_place
@json_option
def stop(cache_dir: str | None, as_json: bool) -> None:
    """End the daemon. Open files stay readable; the cache stays on disk."""
    from .stopping import stop_and_wait

    with _client(cache_dir, autostart=False) as client:
        _show({"stopped": stop_and_wait(client)}, as_json)


@cli.command()
@_place
@json_option
def status(cache_dir: str | None, as_json: bool) -> None:
    """Show the daemon, the use of the disk and the counters."""
    with _client(cache_dir, autostart=False) as client:
        try:
            values: dict[str, Any] = {"running": True, **client.stats()}
        except DaemonUnavailable:
            values = {"running": False, "cache_dir": str(client.settings.cache_dir)}
    _show(values, as_json)


@cli.command()
@click.argument("urls", nargs=-1, required=True)
@_place
@origin_options
@json_option
def warm(urls: tuple[str, ...], cache_dir: str | None, as_json: bool, **origin: Any) -> None:
    """Fetch objects into the cache and wait until they are there.

    URLS are objects (s3://bucket/key), folders (s3://bucket/folder/) or patterns (s3://bucket/train-*.tar).
    """
    from .progress import byte_bar
    from .warm import expand
    from .warm import warm as bring

    with _client(cache_dir, **origin) as client:
        items = expand(client, urls)
        with byte_bar("warming", sum(item.size for item in items), show=not as_json) as advance:
            report = bring(client, items, advance)
    if report.failures:
        first, more = report.failures[0], len(report.failures) - 1
        if more:
            first = type(first)(f"{first.what}; {more} more failed", url=first.url, hint=first.hint)
        if as_json:
            _show({"objects": report.objects, "bytes": report.bytes, "failed": len(report.failures)}, as_json)
        raise first
    _show({"objects": report.objects, "bytes": report.bytes, "failed": 0}, as_json)


@cli.command()
@click.argument("url", required=False)
@click.option("-r", "--recursive", is_flag=True, help="All objects below the folder.")
@_place
@origin_options
@json_option
def ls(url: str | None, recursive: bool, cache_dir: str | None, as_json: bool, **origin: Any) -> None:
    """List a folder's objects, with how much of each is cached. Without URL, what is in the cache."""
    import json

    from .objstore.url import parse_url

    with _client(cache_dir, **origin) as client:
        if url is None:
            entries = [{name: getattr(e, name) for name in e.__struct_fields__} for e in client.entries()]
            rows = sorted(entries, key=lambda entry: str(entry["url"]))
        else:
            rows = [dataclasses.asdict(item) for item in client.list(url, delimiter=not recursive, cached=True)]
            target = parse_url(url)
            if not rows and target.key and not target.is_local:
                found = client.stat(url)  # one object, an empty folder's marker, or NotFound
                rows = [] if target.key.endswith("/") else [dataclasses.asdict(found)]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        prefix = str(row["url"]).endswith("/")
        share = "" if prefix else f"{_percent(row['cached_bytes'], row['size']):>4}"
        click.echo(f"{'' if prefix else row['size']:>14} {share:>5}  {plain(row['url'])}")


@cli.command()
@click.argument("url")
@_place
@origin_options
@json_option
def stat(url: str, cache_dir: str | None, as_json: bool, **origin: Any) -> None:
    """Show one object: size, version, and how many of its bytes are cached."""
    with _client(cache_dir, **origin) as client:
        _show(dataclasses.asdict(client.stat(url)), as_json)


@cli.command()
@click.argument("urls", nargs=-1)
@click.option("--all", "everything", is_flag=True, help="Drop all entries.")
@_place
@json_option
def evict(urls: tuple[str, ...], everything: bool, cache_dir: str | None, as_json: bool) -> None:
    """Drop objects, folders or patterns from the cache. What is in use stays, and makes the command fail."""
    from .selection import select

    if everything == bool(urls):
        raise ConfigError("give URLs to drop, or --all")
    chosen = [select(url) for url in urls]
    with _client(cache_dir) as client:
        found = None
        if not everything:
            found = sorted({e.url for e in client.entries() if any(c.matches(e.url) for c in chosen)})
        gone = client.evict(found)
    _show({"entries": gone.entries, "bytes": gone.bytes, "busy": gone.busy}, as_json)
    if gone.busy:
        raise CacheError(f"{gone.busy} entries are in use and stay", url=" ".join(urls) or None)


def _show(values: dict[str, Any], as_json: bool) -> None:
    """One JSON object, or a line per value."""
    if as_json:
        import json

        click.echo(json.dumps(values))
        return
    width = max(map(len, values), default=0)
    for name, value in values.items():
        click.echo(f"{name:<{width}}  {plain(_human(name, value))}")


def _human(name: str, value: Any) -> str:
    if name.endswith("bytes") and isinstance(value, (int, float)) and value >= 1024:
        from .progress import human_bytes

        return f"{human_bytes(value)} ({value:.0f})"
    if isinstance(value, float) and value.is_integer():
        return f"{value:.0f}"
    return "-" if value is None else str(value)


def _percent(part: int, whole: int) -> str:
    return f"{100 * part // whole if whole else 100}%"
