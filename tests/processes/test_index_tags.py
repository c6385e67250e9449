"""Every client finds messages by tag through an index with entries for tags."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mqproc import AsyncClient, StoreReader
from mqproc.errors import BadRequestError
from mqproc.types import StoredMessage
from tests.support.command_line import call
from tests.support.group import Group
from tests.support.store_builders import FIRST_MS, TaggedStore

TAGS = ("new", "paid", "a b", "schlußtag", "")
COUNT = 200


@pytest.fixture(scope="module")
def tagged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    """A running group with an index of tags."""
    group = Group(tmp_path_factory.mktemp("tagged") / "store", message_index_tags=True, max_pull_bytes=4096).start()
    with group.client() as client:
        bodies = [b"%d" % number for number in range(COUNT)]
        tags = [TAGS[number % len(TAGS)] for number in range(COUNT)]
        client.send_batch("orders", bodies, keys=[["paid"] for _ in bodies], tags=tags)
        client.send_batch("other", bodies, tags="paid")
    group.wait_dispatched()
    yield group
    group.close()


def numbers(found: list[StoredMessage]) -> list[int]:
    return [int(message.body) for message in found]


def by_client(group: Group, tag: str, **limits: Any) -> list[StoredMessage]:
    with group.client() as client:
        return list(client.by_tag("orders", tag, **limits))


def by_async_client(group: Group, tag: str, **limits: Any) -> list[StoredMessage]:
    async def ask() -> list[StoredMessage]:
        async with AsyncClient(group.store) as client:
            return await client.by_tag("orders", tag, **limits)

    return asyncio.run(ask())


def by_reader(group: Group, tag: str, **limits: Any) -> list[StoredMessage]:
    with StoreReader(group.store) as reader:
        return reader.by_tag("orders", tag, **limits)


Search = Callable[..., list[StoredMessage]]


@pytest.mark.parametrize("search", [by_client, by_async_client, by_reader])
@pytest.mark.parametrize("number", range(len(TAGS) - 1))
def test_by_tag_finds_the_messages_of_a_tag(tagged: Group, search: Search, number: int) -> None:
    expected = list(range(number, COUNT, len(TAGS)))
    assert numbers(search(tagged, TAGS[number])) == expected
    assert numbers(search(tagged, TAGS[number], max_messages=7)) == expected[-7:]
    assert search(tagged, "unused") == []


@pytest.mark.parametrize("search", [by_client, by_async_client, by_reader])
def test_by_tag_without_a_tag_is_refused(tagged: Group, search: Search) -> None:
    with pytest.raises(BadRequestError, match="tag"):
        search(tagged, "")


def test_by_tag_reads_pages_and_time_ranges(tagged: Group) -> None:
    with tagged.client() as client:
        found = client.by_tag("other", "paid", max_messages=COUNT)
        assert numbers(found) == list(range(COUNT))
        last_ms = found[-1].store_timestamp_ms
        assert numbers(client.by_tag("other", "paid", begin=last_ms, max_messages=1)) == [COUNT - 1]
        assert client.by_tag("other", "paid", begin=last_ms + 1) == []
        born_ms = found[-1].born_timestamp_ms
        assert client.by_tag("other", "paid", begin=born_ms, time="born")[-1].body == found[-1].body


def test_message_tag_shows_messages_and_exit_codes(tagged: Group) -> None:
    found = call("message", "tag", "orders", "schlußtag", "--store", tagged.store, "--json", "--max", "3")
    assert (found.code, [row["tag"] for row in found.json["messages"]]) == (0, ["schlußtag"] * 3), found
    assert call("message", "tag", "orders", "none", "--store", tagged.store).code == 5


def test_by_tag_without_entries_for_tags_is_refused(make_group: Callable[..., Group]) -> None:
    """An empty answer would look as if no message had the tag."""
    group = make_group()
    with group.client() as client:
        client.send("orders", b"1", tag="paid")
        group.wait_dispatched()
        with pytest.raises(BadRequestError, match="message_index_tags"):
            client.by_tag("orders", "paid")
    with StoreReader(group.store) as reader, pytest.raises(BadRequestError, match="message_index_tags"):
        reader.by_tag("orders", "paid")
    outcome = call("message", "tag", "orders", "paid", "--store", group.store)
    assert outcome.code != 0
    assert "message_index_tags" in outcome.err


def test_by_tag_without_an_index_is_refused(make_group: Callable[..., Group]) -> None:
    group = make_group(message_index_enable=False, message_index_tags=True)
    with group.client() as client:
        client.send("orders", b"1", tag="paid")
        with pytest.raises(BadRequestError, match="message_index_enable is off"):
            client.by_tag("orders", "paid")


def test_by_tag_of_an_upgraded_store_needs_a_begin(tmp_path: Path) -> None:
    """RocketMQ 5.3 stored the first part: an answer from the index would lack it."""
    built = TaggedStore(tmp_path / "store").add(100, tags=False)
    built.append("orders", [b"1"] * 20, FIRST_MS + 5000, tags=["paid"] * 20, keys=["k"] * 20)
    built.add(0, tags=True)
    root = built.close_as_rocketmq()
    with StoreReader(root) as reader:
        with pytest.raises(BadRequestError, match="stored since"):
            reader.by_tag("orders", "paid")
        with pytest.raises(BadRequestError, match="stored since"):
            reader.by_tag("orders", "paid", FIRST_MS + 4999)
        assert len(reader.by_tag("orders", "paid", FIRST_MS + 5000)) == 20


@pytest.mark.parametrize("tags", [True, False])
def test_group_continues_the_index_of_a_store(make_group: Callable[..., Group], tags: bool) -> None:
    """A store's index decides, whatever the option says; without an index, the last group's."""
    group = make_group(message_index_tags=tags)
    with group.client() as client:
        client.send_batch("orders", [b"1"] * 10, tags="paid")
    group.wait_dispatched()
    assert group.stop() == 0
    group.options["message_index_tags"] = not tags
    for _restart in range(2):
        group.start()
        with group.client() as client:
            client.send_batch("orders", [b"1"] * 10, tags="paid")
        group.wait_dispatched()
        assert group.stop() == 0
        found = call("store", "verify", group.store, "--json")
        assert found.code == 0, found
    if not tags:
        return
    shutil.rmtree(group.paths.index)
    group.start()
    with group.client() as client:
        assert len(client.by_tag("orders", "paid")) == 30
