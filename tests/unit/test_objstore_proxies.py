"""Whether a request goes through a proxy."""

from __future__ import annotations

import pytest

from cachefs.config import Origin
from cachefs.objstore.proxies import DIRECT, proxy_for

HTTP = "http://proxy:3128"
BOTH = {"HTTP_PROXY": "http://plain:1", "HTTPS_PROXY": "http://sealed:2"}


@pytest.mark.parametrize(
    ("variables", "endpoint", "proxy"),
    [
        ({}, "https://s3.lan", None),
        ({"NO_PROXY": "*"}, "https://s3.lan", None),
        (BOTH, "https://s3.lan", "http://sealed:2"),
        (BOTH, "http://s3.lan", "http://plain:1"),
        ({"HTTPS_PROXY": "http://sealed:2"}, "http://s3.lan", None),
        ({"ALL_PROXY": "proxy:3128"}, "http://s3.lan", HTTP),
        ({"HTTPS_PROXY": "upper:1", "https_proxy": "lower:1"}, "https://s3.lan", "http://lower:1"),
        ({**BOTH, "NEARFLASH_PROXY": HTTP}, "https://s3.lan", HTTP),
        ({**BOTH, "NEARFLASH_PROXY": "none"}, "https://s3.lan", DIRECT),
        ({**BOTH, "NO_PROXY": "s3.lan"}, "https://b.s3.lan", DIRECT),
        ({**BOTH, "NO_PROXY": " .lan ,x"}, "https://b.s3.lan", DIRECT),
        ({**BOTH, "NO_PROXY": "*.lan"}, "https://b.s3.lan", DIRECT),
        ({**BOTH, "NO_PROXY": "3.lan"}, "https://b.s3.lan", "http://sealed:2"),
        ({**BOTH, "NO_PROXY": "s3.lan:443"}, "https://s3.lan", DIRECT),
        ({**BOTH, "NO_PROXY": "s3.lan:8443"}, "https://s3.lan", "http://sealed:2"),
        ({**BOTH, "NO_PROXY": "10.1.2.3:9000"}, "http://10.1.2.3:9000", DIRECT),
        ({**BOTH, "NO_PROXY": "10.0.0.0/8"}, "http://10.1.2.3:9000", DIRECT),
        ({**BOTH, "NO_PROXY": "10.0.0.0/8"}, "http://11.1.2.3:9000", "http://plain:1"),
        ({**BOTH, "NO_PROXY": "[::1]:9000,fd00::/8"}, "http://[::1]:9000", DIRECT),
        ({**BOTH, "NO_PROXY": "::1"}, "http://[::1]:9000", DIRECT),
        ({**BOTH, "NO_PROXY": "fd00::/8"}, "http://[fd00::1]:9000", DIRECT),
        ({**BOTH, "NO_PROXY": "S3.LAN"}, "https://s3.lan", DIRECT),
    ],
    ids=str,
)
def test_which_proxy(variables: dict[str, str], endpoint: str, proxy: str | None) -> None:
    assert proxy_for(Origin.from_env(variables), endpoint) == proxy


def test_an_origin_tells_its_proxies_apart_and_hides_them() -> None:
    one, other = (Origin.from_env({"HTTPS_PROXY": f"http://me:secret@{name}:1"}) for name in ("a", "b"))
    assert one.identity() != other.identity()
    assert "secret" not in repr(one)
