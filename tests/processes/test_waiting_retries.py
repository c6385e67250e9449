"""Messages that wait for their retry, and dead letters, are figures of the group."""

from __future__ import annotations

import re
import signal
import urllib.request
from collections.abc import Callable

from mqproc.layout.control import KEEPER
from mqproc.topic_names import dead_letter_topic
from tests.support.command_line import call
from tests.support.group import PATIENCE_S, Group, wait_until

MESSAGES = 3


def metric(group: Group, name: str) -> float | None:
    """Value of a metric of the group `billing`."""
    port = wait_until(lambda: group.words()["monitor_port"], what="the monitor listens")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        text = answer.read().decode()
    found = re.search(rf'^{name}\{{group="billing"\}} ([\d.]+)$', text, re.MULTILINE)
    return float(found[1]) if found else None


def nack_all(group: Group, delay_level: int) -> None:
    with group.client(timeout=PATIENCE_S) as client:
        client.create_topic("T", 1)
        client.send_batch("T", [b"x"] * MESSAGES)
        with client.consumer("billing", "T", start="earliest") as consumer:
            left = MESSAGES
            while left:
                messages = consumer.receive(left, timeout=PATIENCE_S)
                consumer.nack(*messages, delay_level=delay_level)
                left -= len(messages)
    group.wait_dispatched()


def test_waiting_retries_are_figures_of_the_group(make_group: Callable[..., Group]) -> None:
    group = make_group()
    nack_all(group, delay_level=9)
    found = call("group", "info", "billing", "--store", group.store, "--json").json
    assert (found["lag"], found["waiting_retries"]) == (0, MESSAGES)
    shown = call("group", "info", "billing", "--store", group.store)
    assert f"0 messages not consumed, {MESSAGES} waiting for a retry" in shown.out
    (row,) = call("group", "list", "--store", group.store, "--json").json["groups"]
    assert (row["group"], row["waiting_retries"]) == ("billing", MESSAGES)
    wait_until(lambda: metric(group, "mqproc_waiting_retries") == MESSAGES, what="the metric")
    # A successor counts them again.
    group.process.send_signal(signal.SIGTERM)
    assert group.process.wait(60) == 0
    group.start()
    with group.client() as client:
        assert client.groups.info("billing").waiting_retries == MESSAGES


def test_delivered_retries_wait_no_longer(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.stopped_role(KEEPER):
        nack_all(group, delay_level=1)
        with group.client() as client:
            assert client.groups.info("billing").waiting_retries == MESSAGES
    with group.client() as client:
        wait_until(lambda: client.groups.info("billing").lag == MESSAGES, what="the retries are delivered")
        wait_until(lambda: client.groups.info("billing").waiting_retries == 0, what="none waits")


def test_each_group_has_its_figures_from_its_creation_on(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        client.groups.change("billing", retry_max_times=3)
    for name in ("mqproc_dead_letters_total", "mqproc_waiting_retries"):
        wait_until(lambda name=name: metric(group, name) == 0, what=name)


def test_dead_letters_of_a_deleted_group_stay_its_own(make_group: Callable[..., Group]) -> None:
    """A counter that changes its label would look like new dead letters of another group."""
    group = make_group()
    nack_all(group, delay_level=-1)
    with group.client() as client:
        client.groups.delete("billing")
        assert metric(group, "mqproc_dead_letters_total") == MESSAGES
        client.delete_topic(dead_letter_topic("billing"))
    assert metric(group, "mqproc_dead_letters_total") == MESSAGES


def test_dead_letters_are_counted_by_group(make_group: Callable[..., Group]) -> None:
    group = make_group()
    with group.client() as client:
        client.create_topic("T", 1)
        with client.consumer("billing", "T", start="earliest"):
            wait_until(lambda: client.groups.info("billing").queues, what="the group has offsets")
    wait_until(lambda: metric(group, "mqproc_dead_letters_total") == 0, what="the group's metric")
    nack_all(group, delay_level=-1)
    wait_until(lambda: metric(group, "mqproc_dead_letters_total") == MESSAGES, what="the dead letters")
