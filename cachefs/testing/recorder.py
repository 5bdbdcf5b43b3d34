"""A tiny HTTP server that answers like an S3 store (or a proxy in front of one) and records what arrived."""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self

from .wire import parse_range


@dataclass(frozen=True)
class Arrived:
    """One request. ``target`` as it stood in the request line; header names in small letters."""

    method: str
    target: str
    headers: dict[str, str]


class Recorder:
    """One object, ``body``, under every name; what is PUT is taken and forgotten. A context manager.

    A request to it as to a proxy (an absolute URL) is answered like any other; CONNECT is refused. With ``certificate``
    and ``key`` (PEM files) it speaks TLS.
    """

    def __init__(
        self, body: bytes = b"0123456789", *, certificate: Path | None = None, key: Path | None = None
    ) -> None:
        recorder = self
        self.arrived: list[Arrived] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1  # head and body in one piece

            def _answer(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                recorder.arrived.append(Arrived(self.command, self.path, headers))
                self.rfile.read(int(headers.get("content-length", 0)))
                span = parse_range(headers.get("range", "").encode())
                start, end = (span[0], span[1] or len(body)) if span else (0, len(body))
                reply = b"" if self.command in {"PUT", "CONNECT"} else body[start:end]
                self.send_response(403 if self.command == "CONNECT" else 206 if span else 200)
                self.send_header("ETag", '"1"')
                self.send_header("Last-Modified", "Wed, 21 Oct 2015 07:28:00 GMT")
                self.send_header("Content-Length", str(len(reply)))
                if span:
                    self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(body)}")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(reply)
                self.wfile.flush()

            def handle_expect_100(self) -> bool:
                goes_on = super().handle_expect_100()
                self.wfile.flush()
                return goes_on

            do_GET = do_HEAD = do_PUT = do_CONNECT = _answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        scheme = "http"
        if certificate is not None:
            scheme = "https"
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate, key)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"{scheme}://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="recorder", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
