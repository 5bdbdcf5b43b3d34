"""Settings: precedence, sizes, and errors that name their source."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachefs.client import connect
from cachefs.cloudvars import AZURE, GOOGLE, store_options
from cachefs.config import Origin, Settings, default_socket, rank_environment
from cachefs.errors import ConfigError
from cachefs.protocol import VERSIONS, Hello, decode_request, encode
from cachefs.values import parse_size

ROOT = Path(__file__).parents[2]


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
        ({"NEARFLASH_EVICTION": "random"}, "not one of s3fifo, lru"),
        ({"NEARFLASH_PLANS": "some"}, "NEARFLASH_PLANS"),
        ({"NEARFLASH_JOB_SHARE": "0"}, "NEARFLASH_JOB_SHARE"),
        ({"NEARFLASH_JOB_SHARE": "nan"}, "NEARFLASH_JOB_SHARE"),
        ({"NEARFLASH_CONFIG": "/nonexistent/nearflash.toml"}, "/nonexistent/nearflash.toml"),
    ],
)
def test_a_bad_value_names_where_it_came_from(env: dict[str, str], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings.load(env, cache_dir=tmp_path)


def test_plans_can_be_switched_off(tmp_path: Path) -> None:
    assert Settings.load({}, cache_dir=tmp_path).plans
    assert not Settings.load({"NEARFLASH_PLANS": "off"}, cache_dir=tmp_path).plans


def test_an_unknown_variable_is_a_warning_that_names_the_nearest(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"NEARFLASH_QOUTA is no setting .*perhaps NEARFLASH_QUOTA is meant"):
        Settings.load({"NEARFLASH_QOUTA": "5GB"}, cache_dir=tmp_path)
    with pytest.warns(UserWarning, match="NEARFLASH_XYZZY is no setting"):
        Settings.load({"NEARFLASH_XYZZY": ""}, cache_dir=tmp_path)
    names = re.findall(r"^\| `(NEARFLASH_\w+)`", (ROOT / "docs/settings.md").read_text(), re.MULTILINE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Settings.load(dict.fromkeys([*names, "NEARFLASH_CONFIG", "NEARFLASH_TEST_MARK"], ""), cache_dir=tmp_path)


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


def test_the_launcher_s_rank_needs_both_variables() -> None:
    assert rank_environment({"RANK": "2", "WORLD_SIZE": "4"}) == ("2", "4")
    for env in ({}, {"RANK": "2"}, {"WORLD_SIZE": "4"}, {"RANK": "", "WORLD_SIZE": "4"}):
        assert rank_environment(env) is None


@pytest.mark.parametrize(
    "line",
    [
        "quota = 1.5",
        "quota = true",
        "quota = -1",
        'quota = "1e3"',
        "cache_dir = 5",
        'cache_dir = ""',
        'cache_dir = "~nobody-of-this-name/x"',
        'socket = ["a"]',
        "stall_timeout = [1]",
        "stall_timeout = nan",
        "stall_timeout = 0",
        "request_deadline = -1",
        "request_deadline = inf",
        "request_deadline = true",
        'idle_timeout = "-1"',
        "idle_timeout = 1e300",
        "connect_timeout = 1979-05-27",
        "origin_parallel = 2.9",
        "origin_parallel = 0",
        'origin_parallel = "many"',
        "chunk_size = 0x1_0000_0000_0000_0000",
        "autostart = 2",
        'autostart = ""',
    ],
)
def test_a_value_that_makes_no_sense_is_one_line_that_names_file_and_setting(line: str, tmp_path: Path) -> None:
    toml = tmp_path / "x.toml"
    toml.write_text(line + "\n")
    with pytest.raises(ConfigError) as caught:
        Settings.load({"NEARFLASH_CONFIG": str(toml), "HOME": str(tmp_path)})
    assert str(caught.value).startswith(f"{toml}: {line.split(' ')[0]}=") and "\n" not in str(caught.value)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    toml = tmp_path / "x.toml"
    toml.write_bytes(b"quota = '\xff'\n")
    with pytest.raises(ConfigError, match=r"x\.toml: cannot be read"):
        Settings.load({"NEARFLASH_CONFIG": str(toml)})


@pytest.mark.parametrize(("text", "value"), [("on", True), ("1", True), ("Off", False), ("", False)])
def test_anonymous_takes_what_other_switches_take(text: str, value: bool) -> None:
    assert Origin.from_env({"NEARFLASH_ANONYMOUS": text}).anonymous is value


def test_a_switch_that_is_neither_on_nor_off_is_named() -> None:
    with pytest.raises(ConfigError, match="NEARFLASH_ANONYMOUS='maybe'"):
        Origin.from_env({"NEARFLASH_ANONYMOUS": "maybe"})


def test_a_tilde_is_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    s = Settings.load({"HOME": str(tmp_path)}, cache_dir="~/x", socket="~/s.sock")
    assert (s.cache_dir, s.socket) == (tmp_path / "x", tmp_path / "s.sock")
    assert Settings(Path("~/x"), Path("~/y")).cache_dir == tmp_path / "x"


@given(st.sampled_from(["quota", "free_floor", "transfer_bytes"]), st.integers(8 << 20, 2**63 - 1))
def test_values_are_taken_again_as_they_are(name: str, size: int) -> None:
    s = Settings(Path("/c"), Path("/s")).with_(**{name: str(size)})
    assert getattr(s, name) == size and s.with_() == s


def test_changes_are_read_and_checked_like_any_other_source(tmp_path: Path) -> None:
    s = Settings.load({}, cache_dir=tmp_path)
    client = connect(s, quota="10GB", idle_timeout="5", autostart=None)
    assert (client.settings.quota, client.settings.idle_timeout) == (10**10, 5.0)
    for bad, says in (
        ({"qouta": 5}, "qouta is not a setting"),
        ({"quota": 1.5}, "quota=1.5"),
        ({"chunk_size": 100}, "chunk_size 100"),
        ({"origin": "minio"}, "origin is not an Origin"),
    ):
        with pytest.raises(ConfigError, match=says):
            connect(s, **bad)
        with pytest.raises(ConfigError, match=says):
            Settings.load({}, **bad)


def test_another_cache_directory_has_another_socket_unless_one_was_named(tmp_path: Path) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path)}
    s = Settings.load(env, cache_dir=tmp_path / "a")
    other = connect(s, cache_dir=str(tmp_path / "b")).settings
    assert other == Settings.load(env, cache_dir=tmp_path / "b") and other.socket != s.socket
    assert s.with_(quota=5).socket == s.socket
    assert s.with_(cache_dir=tmp_path / "b", socket=s.socket).socket == s.socket
    named = Settings.load(env, cache_dir=tmp_path / "a", socket=tmp_path / "mine.sock")
    assert named.with_(cache_dir=tmp_path / "b").socket == tmp_path / "mine.sock"
