"""Settings: precedence, sizes, and errors that name their source."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.cloudvars import AZURE, GOOGLE, store_options
from cachefs.config import Origin, Settings, default_socket, parse_size
from cachefs.errors import ConfigError
from cachefs.protocol import VERSIONS, Hello, decode_request, encode


def test_arguments_win_over_environment_over_file_over_default(tmp_path: Path) -> None:
    toml = tmp_path / "nearflash.toml"
    toml.write_text('quota = "1GiB"\nidle_timeout = 5\nstall_timeout = 7\n')
    env = {"NEARFLASH_CONFIG": str(toml), "NEARFLASH_IDLE_TIMEOUT": "6", "NEARFLASH_STALL_TIMEOUT": "8"}
    s = Settings.load(env, cache_dir=tmp_path / "c", stall_timeout=9)
    assert (s.quota, s.idle_timeout, s.stall_timeout) == (1 << 30, 6.0, 9.0)
    assert s.connect_timeout == Settings.load({}, cache_dir=tmp_path).connect_timeout


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"NEARFLASH_QUOTA": "lots"}, "NEARFLASH_QUOTA"),
        ({"NEARFLASH_CHUNK_SIZE": "100"}, "chunk_size 100"),
        ({"NEARFLASH_AUTOSTART": "maybe"}, "NEARFLASH_AUTOSTART"),
        ({"NEARFLASH_CONFIG": "/nonexistent/nearflash.toml"}, "/nonexistent/nearflash.toml"),
    ],
)
def test_a_bad_value_names_where_it_came_from(env: dict[str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings.load(env, cache_dir=tmp_path)


def test_an_unknown_key_in_the_file_is_an_error(tmp_path: Path) -> None:
    toml = tmp_path / "x.toml"
    toml.write_text("qouta = 5\n")
    with pytest.raises(ConfigError, match="qouta is not a setting"):
        Settings.load({"NEARFLASH_CONFIG": str(toml)}, cache_dir=tmp_path)


@pytest.mark.parametrize(
    ("text", "size"),
    [("64", 64), ("1k", 1024), ("10GB", 10**10), ("1.5 TiB", 3 << 39), ("2MiB", 2 << 20), (7, 7), ("3b", 3)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@given(st.text(max_size=12))
def test_a_size_is_a_number_or_a_config_error(text: str) -> None:
    try:
        assert parse_size(text) >= 0
    except ConfigError as e:
        assert "\n" not in str(e)


@given(st.text(alphabet="abc/é", min_size=1, max_size=300))
def test_the_default_socket_path_fits_the_kernel(tail: str) -> None:
    path = default_socket(Path("/x") / tail.strip("/"), {"XDG_RUNTIME_DIR": "/run/user/1000" + "/deep" * 40})
    assert len(bytes(path)) < 100


def test_secrets_never_appear_in_a_repr(tmp_path: Path) -> None:
    env = {"AWS_ACCESS_KEY_ID": "AKIDXXXX", "AWS_SECRET_ACCESS_KEY": "hush-hush", "AWS_SESSION_TOKEN": "tok-tok"}
    s = Settings.load(env, cache_dir=tmp_path)
    assert s.origin.secret_access_key == "hush-hush"
    for secret in ("hush-hush", "tok-tok", "AKIDXXXX"):
        assert secret not in repr(s)


def test_origins_with_other_secrets_have_other_identities() -> None:
    a, b = Origin(access_key_id="k", secret_access_key="1"), Origin(access_key_id="k", secret_access_key="2")
    assert a.identity() != b.identity()
    assert a.identity() == Origin(access_key_id="k", secret_access_key="1").identity()


def test_variables_of_other_clouds_travel_with_the_origin() -> None:
    env = {"AZURE_STORAGE_ACCOUNT_KEY": "hush", "AZURE_STORAGE_ACCOUNT_NAME": "acc", "AZURE_DEVOPS_PAT": "no"}
    origin = Origin.from_env(env)
    assert origin.extra == (("AZURE_STORAGE_ACCOUNT_KEY", "hush"), ("AZURE_STORAGE_ACCOUNT_NAME", "acc"))
    assert "hush" not in repr(origin)
    assert origin.identity() != Origin().identity()
    hello = Hello(VERSIONS, "s", 1, origin)
    assert decode_request(encode(hello)[4:]) == hello
    assert store_options(AZURE, origin.extra) == {"account_name": "acc", "account_key": "hush"}
    both = (("GOOGLE_SERVICE_ACCOUNT", "/a"), ("GOOGLE_SERVICE_ACCOUNT_PATH", "/b"))
    assert store_options(GOOGLE, both) == {"service_account": "/a"}


@pytest.mark.parametrize("endpoint", ["http://me:hush@127.0.0.1:9000", "https://h/?token=hush"])
def test_an_endpoint_with_a_secret_in_it_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="an endpoint holds no user name") as caught:
        Origin.from_env({"AWS_ENDPOINT_URL": endpoint})
    assert "hush" not in str(caught.value)
