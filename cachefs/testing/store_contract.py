"""What every object store of :mod:`cachefs.objstore` has to do, as tests that a backend's test module inherits.

Subclass :class:`StoreContract`, say what the store cannot do, and implement :meth:`StoreContract.open`. pytest collects
the inherited tests. They need nothing but an empty place for keys, so they run on a real bucket as well::

    class TestMine(StoreContract):
        can_condition = False

        def open(self) -> ObjectStore:
            return open_store("mine://bucket", Origin())
"""

from __future__ import annotations

import array
import asyncio
import unicodedata
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING

import pytest

from ..errors import Changed, ConfigError, NearflashError, NotFound, PreconditionFailed, StoreError
from ..objstore.abc import ObjectMeta, ObjectStore
from .strategies import ODD_KEYS, SPECIAL_NAMES

if TYPE_CHECKING:
    from typing_extensions import Buffer

Body = Callable[[ObjectStore], Awaitable[None]]

_PART = 5 << 20


class StoreContract:
    """The tests. Attributes that a subclass overrides where its store can do less:

    ``prefix``: where the test's keys go. ``can_condition``: conditional create. ``can_match``: conditional overwrite.
    ``keeps_odd_keys``: the ``odd_keys``, which are no paths. ``refuses_odd_keys``: such a key is a ``ConfigError``
    (else it is not tested what becomes of it). ``special_names``: single segments that it keeps apart. ``nests``:
    ``k`` and ``k/1`` can both be objects. ``long_segment``: bytes in one segment. ``many``: number of objects that a
    listing of several pages is tested with (0: not tested).
    """

    prefix = ""
    can_condition = True
    can_match = True
    keeps_odd_keys = False
    refuses_odd_keys = False
    odd_keys: tuple[str, ...] = ODD_KEYS
    special_names: tuple[str, ...] = SPECIAL_NAMES
    nests = True
    long_segment = 300
    many = 0

    def open(self) -> ObjectStore:
        """A store over an empty place, for the running event loop; the test closes it."""
        raise NotImplementedError

    def run(self, body: Body) -> None:
        """Run a test's body on a new store and event loop; nothing of it may be left running."""

        async def main() -> None:
            async with self.open() as store:
                await body(store)
            left = asyncio.all_tasks() - {asyncio.current_task()}
            assert not left, f"still running after close: {left}"

        asyncio.run(main())

    def key(self, name: str) -> str:
        return self.prefix + name

    # --- one object ---------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", [0, 1, 1000, 3 << 20])
    def test_what_is_put_is_read(self, size: int) -> None:
        data = bytes(i % 251 for i in range(size))

        async def body(store: ObjectStore) -> None:
            put = await store.put(self.key("k"), data)
            meta, got = await store.get(self.key("k"))
            assert bytes(got) == data
            assert put.key == meta.key == self.key("k")
            assert put.size == meta.size == size
            assert await store.head(self.key("k")) == meta
            assert put.etag == meta.etag
            assert bytes(await store.get_range(self.key("k"), 0, size, version=meta)) == data

        self.run(body)

    def test_a_put_replaces(self) -> None:
        async def body(store: ObjectStore) -> None:
            await store.put(self.key("k"), b"first")
            await store.put(self.key("k"), b"2nd")
            _, got = await store.get(self.key("k"))
            assert bytes(got) == b"2nd"

        self.run(body)

    def test_any_buffer_and_several_of_them_can_be_put(self) -> None:
        numbers = array.array("I", [1, 2, 3])
        several: list[Buffer] = [b"ab", memoryview(b"xcdx")[1:3], bytearray(b"ef"), b"", numbers]

        async def body(store: ObjectStore) -> None:
            meta = await store.put(self.key("many"), several)
            _, got = await store.get(self.key("many"))
            assert bytes(got) == b"abcdef" + numbers.tobytes()
            assert meta.size == 6 + 12
            await store.put(self.key("view"), memoryview(b"abc"))
            await store.put(self.key("none"), [])
            _, got = await store.get(self.key("view"))
            assert bytes(got) == b"abc"
            assert (await store.head(self.key("none"))).size == 0

        self.run(body)

    def test_ranges(self) -> None:
        data = bytes(range(200))

        async def body(store: ObjectStore) -> None:
            meta = await store.put(self.key("k"), data)
            for start, end in ((0, 1), (199, 200), (50, 150), (0, 200), (7, 7), (200, 200)):
                for version in (None, await store.head(self.key("k"))):
                    got = await store.get_range(self.key("k"), start, end, version=version)
                    view = memoryview(got)
                    assert view.contiguous and bytes(view) == data[start:end]
            pieces = await store.get_ranges(self.key("k"), [(0, 10), (190, 200), (5, 5)])
            assert [bytes(piece) for piece in pieces] == [data[:10], data[190:], b""]
            assert meta.size == 200

        self.run(body)

    def test_a_range_past_the_end_is_an_error(self) -> None:
        async def body(store: ObjectStore) -> None:
            await store.put(self.key("k"), b"12345")
            for start, end in ((3, 8), (5, 6), (10, 20)):
                with pytest.raises(StoreError):
                    await store.get_range(self.key("k"), start, end)

        self.run(body)

    def test_missing(self) -> None:
        async def body(store: ObjectStore) -> None:
            key = self.key("no/such")
            for call in (store.head(key), store.get(key), store.get_range(key, 0, 1)):
                with pytest.raises(NotFound) as caught:
                    await call
                assert "no/such" in str(caught.value) and "\n" not in str(caught.value)

        self.run(body)

    def test_parts_of_a_name_are_no_objects(self) -> None:
        async def body(store: ObjectStore) -> None:
            await store.put(self.key("folder/file"), b"1")
            for name in ("folder", "fold", "folder/file/more"):
                with pytest.raises(NotFound):
                    await store.head(self.key(name))
                with pytest.raises(NotFound):
                    await store.get(self.key(name))

        self.run(body)

    # --- versions -----------------------------------------------------------------------------------------------------

    def test_another_version_is_noticed(self) -> None:
        async def body(store: ObjectStore) -> None:
            key = self.key("k")
            await store.put(key, b"12345")
            old = await store.head(key)
            await store.put(key, b"54321+")
            with pytest.raises(Changed):
                await store.get_range(key, 0, 2, version=old)
            new = await store.head(key)
            assert new.version != old.version
            assert bytes(await store.get_range(key, 0, 2, version=new)) == b"54"
            await store.delete([key])
            with pytest.raises((NotFound, Changed)):
                await store.get_range(key, 0, 2, version=new)

        self.run(body)

    def test_head_get_and_listing_give_the_same_version(self) -> None:
        async def body(store: ObjectStore) -> None:
            await store.put(self.key("k"), b"12345")
            head = await store.head(self.key("k"))
            got, _ = await store.get(self.key("k"))
            (listed,) = [meta async for page in store.list(self.key("k")) for meta in page.objects]
            assert head.version == got.version == listed.version

        self.run(body)

    # --- conditional writes -------------------------------------------------------------------------------------------

    def test_create_only_once(self) -> None:
        async def body(store: ObjectStore) -> None:
            key = self.key("claim")
            if not self.can_condition:
                await self._expect_refused(store.put(key, b"1", if_none_match=True))
                return
            await store.put(key, b"1", if_none_match=True)
            with pytest.raises(PreconditionFailed):
                await store.put(key, b"2", if_none_match=True)
            _, got = await store.get(key)
            assert bytes(got) == b"1"

        self.run(body)

    def test_of_many_creators_one_wins(self) -> None:
        if not self.can_condition:
            pytest.skip("the store has no conditional writes, which test_create_only_once checks")

        async def body(store: ObjectStore) -> None:
            tries = [store.put(self.key("claim"), b"%d" % i, if_none_match=True) for i in range(8)]
            results = await asyncio.gather(*tries, return_exceptions=True)
            won = [i for i, result in enumerate(results) if isinstance(result, ObjectMeta)]
            assert len(won) == 1, results
            assert all(isinstance(r, PreconditionFailed) for r in results if not isinstance(r, ObjectMeta)), results
            _, got = await store.get(self.key("claim"))
            assert bytes(got) == b"%d" % won[0]

        self.run(body)

    def test_overwrite_only_what_was_read(self) -> None:
        async def body(store: ObjectStore) -> None:
            key = self.key("k")
            first = await store.put(key, b"1")
            if not self.can_match:
                await self._expect_refused(store.put(key, b"2", if_match=first.etag or '"x"'))
                return
            assert first.etag is not None
            second = await store.put(key, b"2", if_match=first.etag)
            with pytest.raises(PreconditionFailed):
                await store.put(key, b"3", if_match=first.etag)
            _, got = await store.get(key)
            assert bytes(got) == b"2"
            assert second.etag is not None
            await store.put(key, b"4", if_match=second.etag)

        self.run(body)

    @staticmethod
    async def _expect_refused(call: Awaitable[ObjectMeta]) -> None:
        with pytest.raises(NearflashError) as caught:
            await call
        assert not isinstance(caught.value, PreconditionFailed), "which would say that somebody else was first"

    # --- uploads in parts ---------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("sizes", [[], [0], [10], [_PART, 1], [1, 2, 3], [_PART, _PART + 7, 0, _PART, 99]], ids=str)
    def test_parts_become_one_object(self, sizes: list[int]) -> None:
        parts = [bytes([i + 1]) * size for i, size in enumerate(sizes)]

        async def body(store: ObjectStore) -> None:
            meta = await store.put_multipart(self.key("big"), _parts(parts), concurrency=2)
            found, got = await store.get(self.key("big"))
            assert bytes(got) == b"".join(parts)
            assert meta.size == found.size == sum(sizes)
            assert meta.etag == found.etag

        self.run(body)

    def test_a_source_that_fails_leaves_nothing(self) -> None:
        async def failing() -> AsyncIterator[bytes]:
            yield b"x" * _PART
            yield b"y" * _PART
            raise LookupError("the source broke")

        async def body(store: ObjectStore) -> None:
            with pytest.raises(LookupError, match="the source broke"):
                await store.put_multipart(self.key("big"), failing())
            assert [meta.key async for page in store.list(self.key("")) for meta in page.objects] == []

        self.run(body)

    def test_a_cancelled_upload_leaves_nothing(self) -> None:
        async def body(store: ObjectStore) -> None:
            reached = asyncio.Event()

            async def endless() -> AsyncIterator[bytes]:
                yield b"x" * _PART
                reached.set()
                await asyncio.get_running_loop().create_future()
                yield b"never"

            upload = asyncio.create_task(store.put_multipart(self.key("big"), endless()))
            await asyncio.wait_for(reached.wait(), 20)
            upload.cancel()
            with pytest.raises(asyncio.CancelledError):
                await upload
            assert [meta.key async for page in store.list(self.key("")) for meta in page.objects] == []
            await store.put(self.key("after"), b"the store still works")

        self.run(body)

    # --- deleting -----------------------------------------------------------------------------------------------------

    def test_delete(self) -> None:
        async def body(store: ObjectStore) -> None:
            for name in "abcd":
                await store.put(self.key(name), b"1")
            await store.delete([self.key("a")])
            await store.delete([self.key("b"), self.key("never-there"), self.key("c")])
            await store.delete([self.key("a")])
            await store.delete([])
            assert [m.key async for page in store.list(self.key("")) for m in page.objects] == [self.key("d")]

        self.run(body)

    # --- listing ------------------------------------------------------------------------------------------------------

    def test_list_takes_a_string_prefix(self) -> None:
        names = ["a", "ab", "ab/c", "ab/d/e", "abc", "b"] if self.nests else ["a", "ab0", "ab/c", "ab/d/e", "abc", "b"]

        async def listed(store: ObjectStore, prefix: str) -> list[str]:
            found = [meta.key async for page in store.list(self.key(prefix)) for meta in page.objects]
            return [key.removeprefix(self.prefix) for key in found]

        async def body(store: ObjectStore) -> None:
            for name in names:
                await store.put(self.key(name), name.encode())
            for prefix in ("", "a", "ab", "ab/", "ab/d", "ab/d/e", "zz"):
                assert sorted(await listed(store, prefix)) == sorted(n for n in names if n.startswith(prefix)), prefix
            sizes = {m.key: m.size async for page in store.list(self.key("")) for m in page.objects}
            assert sizes == {self.key(name): len(name) for name in names}

        self.run(body)

    def test_list_with_delimiter(self) -> None:
        async def listed(store: ObjectStore, prefix: str) -> tuple[list[str], list[str]]:
            pages = [page async for page in store.list(self.key(prefix), delimiter=True)]
            objects = [meta.key for page in pages for meta in page.objects]
            prefixes = [p for page in pages for p in page.prefixes]
            assert len(set(objects)) == len(objects) and len(set(prefixes)) == len(prefixes)
            return sorted(key.removeprefix(self.prefix) for key in objects), sorted(
                p.removeprefix(self.prefix) for p in prefixes
            )

        async def body(store: ObjectStore) -> None:
            for name in ("a", "d/x", "d/y", "d/sub/z", "e/f", "dd"):
                await store.put(self.key(name), b"1")
            assert await listed(store, "") == (["a", "dd"], ["d/", "e/"])
            assert await listed(store, "d") == (["dd"], ["d/"])
            assert await listed(store, "d/") == (["d/x", "d/y"], ["d/sub/"])
            assert await listed(store, "d/s") == ([], ["d/sub/"])
            assert await listed(store, "nothing/") == ([], [])

        self.run(body)

    def test_list_of_several_pages(self) -> None:
        if not self.many:
            pytest.skip("listings of several pages are tested on a faster store of the same kind")

        async def body(store: ObjectStore) -> None:
            slots = asyncio.Semaphore(32)

            async def put(name: str) -> None:
                async with slots:
                    await store.put(self.key(name), b"1")

            names = [f"n/{i:06d}" for i in range(self.many)]
            await asyncio.gather(*map(put, [*names, "m", "o/x"]))
            pages = [page async for page in store.list(self.key("n/"))]
            assert [m.key for page in pages for m in page.objects] == [self.key(name) for name in names]
            assert max(len(page.objects) for page in pages) < self.many
            await store.delete([self.key(name) for name in names])
            assert [m.key async for page in store.list(self.key("n/")) for m in page.objects] == []

        self.run(body)

    # --- keys are not paths -------------------------------------------------------------------------------------------

    def test_special_names_are_kept_apart(self) -> None:
        keys = [self.key(f"{name}/x.tar") for name in self.special_names]
        keys += [self.key(f"s/{name}") for name in self.special_names]
        self._kept_apart(keys)

    def test_odd_keys(self) -> None:
        keys = [self.key(name) for name in self.odd_keys]
        if self.keeps_odd_keys:
            self._kept_apart([*keys, self.key("lead"), self.key("trail"), self.key("a/b"), self.key("x")])
        elif self.refuses_odd_keys:

            async def body(store: ObjectStore) -> None:
                for key in keys:
                    with pytest.raises(ConfigError):
                        await store.put(key, b"1")
                    with pytest.raises(ConfigError):
                        await store.head(key)

            self.run(body)
        else:
            pytest.skip("the server behind this store normalises such keys")

    def test_long_keys(self) -> None:
        deep = self.key("/".join(["0123456789"] * 80))
        wide = self.key("w" * self.long_segment)
        self._kept_apart([deep, wide, wide[:-1]])

    def test_a_key_may_be_the_start_of_another(self) -> None:
        if not self.nests:
            pytest.skip("a file cannot be a folder as well")
        self._kept_apart([self.key("k"), self.key("k/1"), self.key("k/1/2")])

    def _kept_apart(self, keys: list[str]) -> None:
        """Each key has its own content, from its name and from a listing, and deleting one leaves the others."""
        contents = {
            key: f"{i}:{unicodedata.normalize('NFD', key)}".encode(errors="surrogateescape")
            for i, key in enumerate(keys)
        }
        assert len(contents) == len(keys)

        async def body(store: ObjectStore) -> None:
            for key, data in contents.items():
                await store.put(key, data)
            listed = [meta async for page in store.list(self.prefix) for meta in page.objects]
            assert {meta.key for meta in listed} ^ set(contents) == set()
            assert len(listed) == len(contents)
            for meta in listed:
                found, got = await store.get(meta.key)
                assert bytes(got) == contents[meta.key], meta.key
                assert (found.key, found.size) == (meta.key, meta.size)
                ranged = await store.get_range(meta.key, 0, meta.size, version=await store.head(meta.key))
                assert bytes(ranged) == contents[meta.key]
            gone = keys[::2]
            await store.delete(gone)
            left = [meta.key async for page in store.list(self.prefix) for meta in page.objects]
            assert set(left) ^ (set(keys) - set(gone)) == set()

        self.run(body)

    def test_folder_markers_are_listed_as_what_they_are(self) -> None:
        if not self.keeps_odd_keys:
            pytest.skip("the store keeps no key that ends in a slash")

        async def body(store: ObjectStore) -> None:
            for name, data in (("dir/", b""), ("dir/a.tar", b"1"), ("pre", b""), ("pre/x", b"2"), ("empty/", b"")):
                await store.put(self.key(name), data)
            everything = [m.key async for page in store.list(self.key("")) for m in page.objects]
            assert sorted(everything) == sorted(self.key(n) for n in ("dir/", "dir/a.tar", "pre", "pre/x", "empty/"))
            top = [page async for page in store.list(self.key(""), delimiter=True)]
            assert [m.key for page in top for m in page.objects] == [self.key("pre")]
            assert sorted(p for page in top for p in page.prefixes) == [self.key(n) for n in ("dir/", "empty/", "pre/")]
            assert (await store.head(self.key("dir/"))).size == 0
            with pytest.raises(NotFound):
                await store.head(self.key("dir"))

        self.run(body)

    # --- life ---------------------------------------------------------------------------------------------------------

    def test_many_requests_at_once(self) -> None:
        async def body(store: ObjectStore) -> None:
            data = {self.key(f"n{i}"): bytes([i]) * (1000 + i) for i in range(24)}
            await asyncio.gather(*(store.put(key, value) for key, value in data.items()))
            got = await asyncio.gather(*(store.get(key) for key in data))
            assert [bytes(value) for _, value in got] == list(data.values())

        self.run(body)

    def test_a_cancelled_read_leaves_the_store_usable(self) -> None:
        async def body(store: ObjectStore) -> None:
            await store.put(self.key("k"), b"x" * (1 << 20))
            for turns in range(6):
                read = asyncio.create_task(store.get(self.key("k")))
                for _ in range(turns):
                    await asyncio.sleep(0)
                read.cancel()
                await asyncio.wait({read})  # cancelled, or finished before it could be
            meta, _ = await store.get(self.key("k"))
            assert meta.size == 1 << 20

        self.run(body)

    def test_close_is_idempotent_and_unused_stores_cost_nothing(self) -> None:
        async def body(store: ObjectStore) -> None:
            await store.put(self.key("k"), b"1")
            await store.close()
            await store.close()

        self.run(body)

        async def unused(store: ObjectStore) -> None:
            pass

        self.run(unused)


async def _parts(parts: list[bytes]) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
