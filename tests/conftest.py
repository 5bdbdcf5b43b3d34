"""Fixtures that every part's tests share."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from cachefs.testing.motoserver import MotoServer
from cachefs.testing.seaweed import SeaweedServer

# A busy machine makes any example slow, which says nothing about the code; the tests have a time limit of their own.
settings.register_profile("nearflash", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nearflash")

# Tests count what reaches an origin, and a busy machine makes any read late enough to be asked for twice. The tests of
# second requests give their own share.
os.environ.setdefault("NEARFLASH_HEDGE_SHARE", "0")


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedServer]:
    """A real S3 server on loopback, started at first use, one for each test process.

    Buckets are shared by the whole session: take a fresh one (``s3_bucket``) or a prefix of your own.
    """
    with SeaweedServer(tmp_path_factory.mktemp("seaweed")) as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[MotoServer]:
    """An S3 emulation that keeps keys exactly as they are, in this process, started at first use."""
    with MotoServer() as server:
        yield server


@pytest.fixture(scope="session")
def _bucket_numbers() -> Iterator[int]:
    return itertools.count()


@pytest.fixture
def s3_bucket(seaweed: SeaweedServer, _bucket_numbers: Iterator[int]) -> str:
    """The name of an empty bucket on the ``seaweed`` server that no other test uses."""
    return seaweed.make_bucket(f"test-{next(_bucket_numbers):04d}")


@pytest.fixture
def moto_bucket(moto: MotoServer, _bucket_numbers: Iterator[int]) -> str:
    """The name of an empty bucket on the ``moto`` server that no other test uses."""
    return moto.make_bucket(f"test-{next(_bucket_numbers):04d}")
