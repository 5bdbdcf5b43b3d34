"""Whether requests to an endpoint go through a proxy. Pure.

``NO_PROXY`` as curl and others read it: names separated by commas, each covers its subdomains, ``*`` everything;
addresses and networks in CIDR form; a port may be added. (There is no standard; see "We need to talk: can we
standardize NO_PROXY?", https://about.gitlab.com/blog/we-need-to-talk-no-proxy/.)
"""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, urlsplit

from ..config import Origin
from ..errors import ConfigError

DIRECT = ""
"""Through no proxy, whatever the process's environment says."""

_PORTS = {"http": 80, "https": 443}


def proxy_for(origin: Origin, endpoint: str) -> str | None:
    """The proxy's URL for requests of this origin to ``endpoint``; :data:`DIRECT`, or ``None`` if it does not say.

    Raises :class:`ConfigError` for a proxy that is no ``http(s)://`` URL.
    """
    target = urlsplit(endpoint)
    named = dict(origin.extra)
    proxy = origin.proxy or named.get(f"{target.scheme.upper()}_PROXY") or named.get("ALL_PROXY")
    if proxy is None:
        return None
    if proxy.lower() in {"none", "direct"} or _goes_past(named.get("NO_PROXY", ""), target):
        return DIRECT
    url = proxy if "://" in proxy else f"http://{proxy}"
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        # Not repeated: it may hold a password.
        what = f"a proxy of the kind {parts.scheme!r} is not supported"
        raise ConfigError(what, url=endpoint, hint="NEARFLASH_PROXY=http://host:port, or none")
    return url


def _goes_past(no_proxy: str, target: SplitResult) -> bool:
    host = (target.hostname or "").rstrip(".")
    port = target.port or _PORTS.get(target.scheme, 0)
    return any(_covers(entry.strip().lower(), host, port) for entry in no_proxy.split(","))


def _covers(entry: str, host: str, port: int) -> bool:
    if not entry:
        return False
    if entry == "*":
        return True
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(entry.strip("[]"), strict=False)
    except ValueError:
        pass  # a name on either side, or an address with a port
    name, colon, number = entry.rpartition(":")
    if colon and (":" not in name or name.endswith("]")):
        return number == str(port) and _covers(name, host, port)
    name = entry.removeprefix("*").strip(".")
    return host == name or host.endswith("." + name)
