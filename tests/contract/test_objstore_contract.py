"""The store contract on every backend, over the servers and places that can be had without a cloud."""

from __future__ import annotations

import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from cachefs.config import Origin
from cachefs.objstore import ObjectStore, open_store
from cachefs.testing.motoserver import MotoServer
from cachefs.testing.seaweed import SeaweedServer
from cachefs.testing.store_contract import StoreContract
from cachefs.testing.stores import DictStore
from cachefs.testing.strategies import ODD_KEYS, SPECIAL_NAMES


class TestDict(StoreContract):
    """The store that other tests rest on."""

    keeps_odd_keys = True
    many = 20

    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self.store = DictStore()

    def open(self) -> ObjectStore:
        return self.store


class TestMemory(StoreContract):
    refuses_odd_keys = True

    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"

    def open(self) -> ObjectStore:
        return open_store(self.url, Origin())


class _OnFiles(StoreContract):
    backend = "auto"
    can_match = False
    refuses_odd_keys = True
    nests = False
    long_segment = 200
    many = 0

    @pytest.fixture(autouse=True)
    def _place(self, tmp_path: Path) -> None:
        self.prefix = f"{tmp_path}/"

    def open(self) -> ObjectStore:
        return open_store("file:///", Origin(backend=self.backend))


class TestFile(_OnFiles):
    odd_keys = tuple(key for key in ODD_KEYS if "\t" not in key)

    def test_any_name_that_a_file_can_have(self) -> None:
        names = ("x", "x#1", "tab\there", "new\nline", "no\udcffunicode")
        self._kept_apart([self.key(name) for name in names])


class TestFileObstoreAlone(_OnFiles):
    backend = "obstore"
    special_names = tuple(
        name for name in SPECIAL_NAMES if name != "h#1"
    )  # object_store's own name for temporary files


class TestFsspecMemory(StoreContract):
    can_condition = False
    can_match = False
    nests = False

    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self.url = f"memory://{uuid.uuid4().hex}"

    def open(self) -> ObjectStore:
        return open_store(self.url, Origin(backend="fsspec"))


class _OnSeaweed(StoreContract):
    backend = "auto"
    nests = False
    long_segment = 200
    special_names = tuple(name for name in SPECIAL_NAMES if "\\" not in name)  # which it turns into a slash

    @pytest.fixture(autouse=True)
    def _place(self, seaweed: SeaweedServer) -> None:
        self.url = f"s3://{seaweed.make_bucket('contract')}"
        self.prefix = f"{uuid.uuid4().hex}/"
        self.origin = replace(seaweed.origin, backend=self.backend)

    def open(self) -> ObjectStore:
        return open_store(self.url, self.origin)


@pytest.mark.s3
@pytest.mark.xdist_group("seaweed")
class TestSeaweed(_OnSeaweed):
    many = 1005


@pytest.mark.s3
@pytest.mark.xdist_group("seaweed")
class TestSeaweedObstoreAlone(_OnSeaweed):
    backend = "obstore"
    refuses_odd_keys = True
    many = 1005

    @pytest.mark.slow
    def test_list_of_several_pages(self) -> None:
        super().test_list_of_several_pages()


@pytest.mark.s3
@pytest.mark.xdist_group("seaweed")
class TestSeaweedS3fs(_OnSeaweed):
    backend = "fsspec"


class _OnMoto(StoreContract):
    backend = "auto"
    keeps_odd_keys = True

    @pytest.fixture(autouse=True)
    def _place(self, moto: MotoServer, moto_bucket: str) -> None:
        self.url = f"s3://{moto_bucket}"
        self.origin = replace(moto.origin, backend=self.backend)

    def open(self) -> ObjectStore:
        return open_store(self.url, self.origin)


class TestMoto(_OnMoto):
    pass


@pytest.mark.slow  # moto takes more time than all stores; what is special about it is in TestMoto
class TestMotoObstoreAlone(_OnMoto):
    backend = "obstore"
    keeps_odd_keys = False
    refuses_odd_keys = True


@pytest.mark.slow
class TestMotoS3fs(_OnMoto):
    backend = "fsspec"
