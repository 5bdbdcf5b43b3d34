"""Objects by plain http(s) URLs and without credentials; the keys of such URLs are percent-encoded already."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote

import pytest

from cachefs.config import Origin
from cachefs.errors import Changed, NotFound
from cachefs.objstore import BlockingStore, parse_url
from cachefs.testing.motoserver import MotoServer
from cachefs.testing.strategies import SPECIAL_NAMES

BACKENDS = ("auto", "obstore", "fsspec")


@pytest.fixture
def filled(moto: MotoServer, moto_bucket: str) -> str:
    moto.make_public(moto_bucket)
    with BlockingStore(f"s3://{moto_bucket}", moto.origin) as store:
        for name in SPECIAL_NAMES:
            store.put(f"d/{name}", name.encode() * 10)
    return moto_bucket


@pytest.mark.parametrize("backend", BACKENDS)
def test_reading_by_url(moto: MotoServer, filled: str, backend: str) -> None:
    with BlockingStore(moto.endpoint, Origin(backend=backend)) as store:
        for name in SPECIAL_NAMES:
            url = parse_url(f"{moto.endpoint}/{filled}/d/{quote(name)}")
            meta = store.head(url.key)
            assert (meta.key, meta.size) == (url.key, len(name.encode()) * 10)
            assert bytes(store.get_range(url.key, 0, meta.size, version=meta)) == name.encode() * 10
        with pytest.raises(NotFound, match="nothing"):
            store.head(f"{filled}/nothing")


def test_a_query_belongs_to_the_key(moto: MotoServer, filled: str) -> None:
    with BlockingStore(moto.endpoint, Origin()) as store:
        key = f"{filled}/d/{quote(SPECIAL_NAMES[0])}"
        _, plain = store.get(key)
        _, with_query = store.get(f"{key}?response-content-type=text/plain")
        assert bytes(plain) == bytes(with_query) == SPECIAL_NAMES[0].encode() * 10


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_public_bucket_needs_no_credentials(
    moto: MotoServer, filled: str, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    origin = replace(moto.origin, access_key_id=None, secret_access_key=None, anonymous=True, backend=backend)
    with BlockingStore(f"s3://{filled}", origin) as store:
        assert store.head("d/a").size == 10
        assert len([m for page in store.list("d/") for m in page.objects]) == len(SPECIAL_NAMES)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changed_object_is_noticed(moto: MotoServer, filled: str, backend: str) -> None:
    with BlockingStore(moto.endpoint, Origin(backend=backend)) as store:
        meta = store.head(f"{filled}/d/a")
        with BlockingStore(f"s3://{filled}", moto.origin) as owner:
            owner.put("d/a", b"something else")
        with pytest.raises(Changed):
            store.get_range(f"{filled}/d/a", 0, 5, version=meta)


@pytest.fixture
def web_folder(tmp_path: Path) -> Iterator[tuple[str, dict[str, bytes]]]:
    """A plain web server whose listings are pages of links, without sizes, and whose replies have no ETag."""
    files = {f"part-{i}.bin": bytes([i]) * (100 + i) for i in range(20)} | {"sub/inner.bin": b"inner"}
    for name, data in files.items():
        target = tmp_path / "www" / "data" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path / "www"))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", files
        server.shutdown()
        thread.join(20)


@pytest.mark.parametrize("backend", ["auto", "fsspec"])
@pytest.mark.parametrize("delimiter", [True, False])
def test_a_listing_gives_sizes_and_versions_as_an_opening_does(
    web_folder: tuple[str, dict[str, bytes]], backend: str, delimiter: bool
) -> None:
    root, files = web_folder
    with BlockingStore(root, Origin(backend=backend)) as store:
        listed = [m for page in store.list("data/", delimiter=delimiter) for m in page.objects]
        wanted = {f"data/{n}": len(d) for n, d in files.items() if not (delimiter and "/" in n)}
        assert {m.key: m.size for m in listed} == wanted
        for meta in listed:
            assert store.head(meta.key).version == meta.version
