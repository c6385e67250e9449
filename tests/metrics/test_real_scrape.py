"""/metrics of a real group over HTTP: equals `mqproc stat`, and is fast with many topics."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mqproc import Message, MessageTooLargeError
from mqproc.layout import control as words_of
from mqproc.metrics.collector import PLAIN, TARGETS
from tests.support.command_line import call
from tests.support.group import PATIENCE_S, Group, assert_below, wait_until

TOPICS = 5_000


def scraped(group: Group) -> str:
    url = f"http://127.0.0.1:{wait_until(lambda: group.words()['monitor_port'])}/metrics"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return str(answer.read().decode())


def counters(text: str) -> dict[tuple[str, ...], float]:
    """Every counter's value by its name and label values."""
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        if family.type == "counter"
        for sample in family.samples
    }


def words_of_counters() -> dict[tuple[str, ...], tuple[str, float]]:
    """Control word and factor of every counter that is a single control word."""
    by_role = {"restarts_total": "restarts", "cycles_total": "cycles"}
    return {
        **{(name,): place for name, place in PLAIN.items() if name.endswith("_total")},
        **{
            (f"mqproc_role_{name}", role): (f"{role}.{word}", 1)
            for name, word in by_role.items()
            for role in words_of.ROLES
        },
        **{("mqproc_errors_total", role): (f"{role}.errors", 1) for role in words_of.ROLES},
        **{
            (f"mqproc_{name}_total", target): (f"{prefix}_{word}", 1)
            for name, word in (("flushes", "syncs"), ("flush_passes", "passes"), ("forced_flushes", "forced_passes"))
            for target, prefix in TARGETS.items()
        },
        **{
            ("mqproc_partial_frames_total", role): (f"{role}_partial_frames", 1)
            for role in (words_of.WRITER, words_of.QUERY)
        },
        ("mqproc_retention_deleted_files_total", "commitlog"): ("retention_segments", 1),
        ("mqproc_retention_deleted_files_total", "consumequeue"): ("retention_queue_files", 1),
        ("mqproc_retention_deleted_files_total", "index"): ("retention_index_files", 1),
    }


def load(group: Group) -> None:
    """Produce some of everything that is counted."""
    with group.client() as client:
        client.create_topic("orders", 4)
        client.send_many([Message("orders", b"x" * 200, keys=[f"k{number}"], tag="t") for number in range(1000)])
        for number in range(50):
            client.send("orders", b"single", keys=[f"s{number}"])
        client.send("orders", b"later", delay_level=1)
        client.wait_dispatched()
        for number in range(20):
            assert len(client.by_key("orders", f"k{number}")) == 1
        with client.consumer("billing", "orders", start="earliest") as consumer:
            messages = consumer.receive(max_messages=64, timeout=PATIENCE_S)
            while messages:
                consumer.nack(*messages[:1], delay_level=-1)
                consumer.ack(*messages[1:])
                messages = consumer.receive(max_messages=64, timeout=1)
        with client.transaction("billing", Message("orders", b"paid")):
            pass
        with pytest.raises(MessageTooLargeError):
            client.send("orders", bytes(1 << 19))
        wait_until(lambda: group.words()["delivered_messages"] == 1, what="the message's time has come")
        client.wait_dispatched()


def test_scrape_counters_equal_mqproc_stat(group: Group) -> None:
    load(group)
    stat: Callable[[], dict[str, float]] = lambda: call("stat", "--store", group.store, "--json").json["words"]  # noqa: E731

    def at_rest() -> tuple[dict[str, float], dict[tuple[str, ...], float], dict[str, float]] | None:
        """Values while no message is being stored.

        Internal appends of transactions and delay levels follow with a short delay.
        """
        before, shown, after = stat(), counters(scraped(group)), stat()
        rests = before["dispatched_messages"] == after["appended_messages"] and not after["delayed_messages"]
        return (before, shown, after) if rests else None

    before, shown, after = wait_until(at_rest, what="a rest")
    places = words_of_counters()
    not_words = {
        f"mqproc_{name}_total"
        for name in (
            *("rejected", "messages_appended", "messages_delivered", "messages_consumed", "process_cpu_seconds"),
            *("log_lines_dropped", "dead_letters"),
        )
    }
    assert {name for name, *_ in shown} - not_words == {name for name, *_ in places}
    wrong = {
        key: (before[word] * factor, shown[key], after[word] * factor)
        for key, (word, factor) in places.items()
        if not before[word] * factor <= shown[key] <= after[word] * factor
    }
    assert wrong == {}
    still = {key for key, (word, _) in places.items() if before[word] == after[word]}
    assert len(still) > len(places) / 2

    def total(name: str) -> float:
        return sum(value for key, value in shown.items() if key[0] == f"mqproc_{name}_total")

    assert total("messages_appended") == after["appended_messages"] == total("messages_dispatched")
    assert total("messages_delivered") == after["pulled_messages"]
    assert total("key_queries") == 20
    assert total("key_entries_matched") == 20
    assert total("transactions_committed") == 1
    assert total("rejected") == total("request_failures") + total("append_failures") >= 1
    assert total("messages_dead_lettered") > 0
    assert group.stop() == 0
    # No count is lost when the processes exit.
    left = stat()
    for key in still:
        assert left[places[key][0]] >= after[places[key][0]], key


@pytest.mark.timeout(900)
def test_scrape_of_5000_topics_takes_less_time_than_reading_its_text(make_group: Callable[..., Group]) -> None:
    group = make_group(max_queues=65_536, mapped_file_size_consume_queue=2000, default_topic_queue_nums=4)
    sent = 0

    def send() -> None:
        """Send a message to each topic, so that all topics have changed since the last scrape."""
        nonlocal sent
        with group.client(timeout=120) as client:
            client.send_many([Message(f"topic-{number}", b"x" * 100) for number in range(TOPICS)])
            client.wait_dispatched()
        sent += 1

    send()
    text = scraped(group)
    seen: list[tuple[float, float]] = []

    def scrape_by_reading() -> float:
        """Time of a scrape, from the first byte of the request, by the time in which its text is read.

        Prometheus's own parser reads it in this process, and a slow or busy machine makes both times longer.
        """
        nonlocal text
        send()
        began = time.perf_counter()
        text = scraped(group)
        answered = time.perf_counter()
        for _family in text_string_to_metric_families(text):
            pass
        seen.append((answered - began, time.perf_counter() - answered))
        return seen[-1][0] / seen[-1][1]

    assert_below(1, scrape_by_reading, rounds=5)
    print("s of a scrape, and s to read its text:", [(round(took, 3), round(read, 3)) for took, read in seen])
    appended = dict(re.findall(r'^mqproc_messages_appended_total\{topic="(topic-\d+)"\} (\d+)\.0$', text, re.MULTILINE))
    assert appended == {f"topic-{number}": f"{sent}" for number in range(TOPICS)}
