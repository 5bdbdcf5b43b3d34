"""Free TCP ports on loopback for servers that tests start."""

from __future__ import annotations

import random
import socket

# Below the range that the kernel takes local ports of outgoing connections from (Linux: 32768 up), so that no
# connection of another process takes one between the check here and the server's own bind.
_LOW, _HIGH = 20_000, 32_000


def free_ports(count: int) -> list[int]:
    """``count`` different ports that nothing listens on at this moment.

    Another process may still take one before its user binds it: callers retry with new ports then.
    Raises ``OSError`` where none can be found.
    """
    found: list[int] = []
    draw = random.SystemRandom()
    for _ in range(200 * count):
        port = draw.randrange(_LOW, _HIGH)
        if port not in found and _is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise OSError(f"no {count} free ports between {_LOW} and {_HIGH}")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True
