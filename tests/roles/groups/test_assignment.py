"""Assignment of queues to members: even, complete, sticky, by subscription."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from mqproc.roles.groups.assignment import assign

MEMBERS = [f"m{number}" for number in range(8)]


def test_assignment_64_queues_over_8_members_gives_8_each() -> None:
    shared = assign({"T": range(64)}, {"T": MEMBERS}, {})
    assert Counter(shared.values()) == dict.fromkeys(MEMBERS, 8)


def test_assignment_leaving_member_moves_only_its_queues() -> None:
    before = assign({"T": range(64)}, {"T": MEMBERS}, {})
    after = assign({"T": range(64)}, {"T": MEMBERS[1:]}, before)
    assert {queue for queue in before if before[queue] != after[queue]} == {
        queue for queue, member in before.items() if member == "m0"
    }
    assert max(Counter(after.values()).values()) - min(Counter(after.values()).values()) <= 1


def test_assignment_joining_member_takes_only_its_share() -> None:
    before = assign({"T": range(64)}, {"T": MEMBERS[:7]}, {})
    after = assign({"T": range(64)}, {"T": MEMBERS}, before)
    moved = {queue for queue in before if before[queue] != after[queue]}
    assert len(moved) == 8
    assert {after[queue] for queue in moved} == {"m7"}


def test_assignment_single_queue_topics_are_spread() -> None:
    shared = assign({f"T{number}": [0] for number in range(8)}, {f"T{number}": MEMBERS for number in range(8)}, {})
    assert Counter(shared.values()) == dict.fromkeys(MEMBERS, 1)


def test_assignment_topic_without_subscribers_is_left_out() -> None:
    assert assign({"T": [0], "U": [0]}, {"U": ["a"]}, {("T", 0): "a"}) == {("U", 0): "a"}


@given(
    topics=st.dictionaries(st.sampled_from("ABCD"), st.integers(0, 20), max_size=4),
    subscriptions=st.dictionaries(st.sampled_from(MEMBERS), st.sets(st.sampled_from("ABCD"), max_size=4), max_size=8),
    owners=st.dictionaries(
        st.tuples(st.sampled_from("ABCDE"), st.integers(0, 25)), st.sampled_from([*MEMBERS, "gone"])
    ),
)
def test_assignment_each_queue_has_one_owner_and_shares_are_even(
    topics: dict[str, int], subscriptions: dict[str, set[str]], owners: dict[tuple[str, int], str]
) -> None:
    queues = {topic: range(count) for topic, count in topics.items()}
    subscribers = {
        topic: sorted(member for member in subscriptions if topic in subscriptions[member]) for topic in "ABCD"
    }
    shared = assign(queues, subscribers, owners)
    wanted = {(topic, queue_id) for topic in topics if subscribers[topic] for queue_id in queues[topic]}
    assert set(shared) == wanted
    load = Counter(shared.values())
    for (topic, _), member in shared.items():
        assert member in subscribers[topic]
        assert load[member] - min(load[other] for other in subscribers[topic]) <= 1
    assert assign(queues, subscribers, shared) == shared
