"""Where keys come from, and that a change of the source is seen while the process runs."""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from cachefs.config import Origin
from cachefs.errors import Denied
from cachefs.objstore.credentials import CredentialSource, ObstoreProvider

URL = "s3://bucket"


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A home without anything, on a machine without a metadata service."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    return tmp_path


def write_keys(file: Path, name: str, profile: str = "default") -> None:
    """Replace the file as a careful program does, so that its stamp differs whatever the file system's clock does."""
    part = file.with_suffix(".part")
    part.write_text(f"[{profile}]\naws_access_key_id = {name}\naws_secret_access_key = {name}-secret\n")
    part.replace(file)


def test_a_file_that_changes_is_read_again(home: Path) -> None:
    write_keys(home / "credentials", "first")
    source = CredentialSource(Origin())
    assert source.keys(URL).access_key_id == "first"
    write_keys(home / "credentials", "second")
    assert source.keys(URL).access_key_id == "second"
    provided = ObstoreProvider(source, URL)()
    assert provided["access_key_id"] == "second"
    assert provided["expires_at"] <= datetime.now(UTC) + timedelta(minutes=5), "obstore asks anew before long"


def test_a_profile_that_changes_is_read_again(home: Path) -> None:
    write_keys(home / "credentials", "first", "team")
    source = CredentialSource(Origin(profile="team"))
    assert source.keys(URL).access_key_id == "first"
    write_keys(home / "credentials", "second", "team")
    assert source.keys(URL).access_key_id == "second"


def test_a_file_that_is_being_written_does_not_take_the_keys_away(home: Path) -> None:
    file = home / "credentials"
    write_keys(file, "first")
    source = CredentialSource(Origin())
    assert source.keys(URL).access_key_id == "first"
    file.write_text("[default\naws_access_")
    assert source.keys(URL).access_key_id == "first"
    file.unlink()
    assert source.keys(URL).access_key_id == "first"
    write_keys(file, "second")
    assert source.keys(URL).access_key_id == "second"
    file.unlink()
    with pytest.raises(Denied, match="no credentials found"):
        source.renew(URL)  # the store has refused them: what is gone does not count any more


def test_a_process_is_asked_again_when_a_store_refuses_what_it_gave(home: Path) -> None:
    answers = home / "answers"
    answers.write_text(
        json.dumps({"Version": 1, "AccessKeyId": "first", "SecretAccessKey": "x", "SessionToken": "a token"})
    )
    (home / "config").write_text(
        f"[default]\ncredential_process = {sys.executable} -c 'print(open(\"{answers}\").read())'\n"
    )
    source = CredentialSource(Origin())
    assert source.keys(URL).session_token == "a token"
    answers.write_text(json.dumps({"Version": 1, "AccessKeyId": "second", "SecretAccessKey": "x"}))
    assert source.keys(URL).access_key_id == "first", "not asked before each request"
    assert source.renew(URL)
    assert source.keys(URL).access_key_id == "second"


def test_a_process_whose_keys_end_is_asked_before_they_do(home: Path) -> None:
    answers = home / "answers"

    def give(name: str, lasts: timedelta) -> None:
        ends = (datetime.now(UTC) + lasts).isoformat()
        answers.write_text(
            json.dumps(
                {"Version": 1, "AccessKeyId": name, "SecretAccessKey": "x", "SessionToken": "t", "Expiration": ends}
            )
        )

    give("first", timedelta(seconds=30))
    (home / "config").write_text(
        f"[default]\ncredential_process = {sys.executable} -c 'print(open(\"{answers}\").read())'\n"
    )
    source = CredentialSource(Origin())
    source.keys(URL)
    give("second", timedelta(hours=1))
    assert source.keys(URL).access_key_id == "second"


def test_fixed_keys_have_no_others() -> None:
    fixed = CredentialSource(Origin(access_key_id="k", secret_access_key="s"))
    assert not fixed.renew(URL)
    assert ObstoreProvider(fixed, URL)()["expires_at"] is None
    assert not CredentialSource(Origin(anonymous=True)).renew(URL)


class KeyService:
    """A container's or an instance's service that gives keys: other ones each time. A context manager."""

    def __init__(self) -> None:
        numbers = itertools.count(1)

        class Answer(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                ends = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
                if self.command == "PUT":  # IMDSv2 asks for a token first
                    body = "a token"
                elif self.path.endswith("/security-credentials/"):
                    body = "a-role"
                else:
                    keys = {"AccessKeyId": f"number {next(numbers)}", "SecretAccessKey": "x", "Token": "t"}
                    body = json.dumps({"Code": "Success", "Expiration": ends, **keys})
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            do_GET = do_PUT = _answer

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Answer)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> KeyService:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(30)


@pytest.mark.parametrize("place", ["container", "instance"])
def test_a_service_on_the_machine(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with KeyService() as service:
        if place == "container":
            monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"{service.url}/keys")
        else:
            monkeypatch.delenv("AWS_EC2_METADATA_DISABLED")
            monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", f"{service.url}/")
        source = CredentialSource(Origin())
        assert source.keys(URL).access_key_id == "number 1"
        assert source.keys(URL).access_key_id == "number 1"
        assert source.renew(URL)
        assert source.keys(URL).access_key_id == "number 2"
