"""Assignment of queues to members in a rebalance: balanced, with as few moves as possible."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

Queue = tuple[str, int]
"""Topic and queue id."""


def assign(
    queues: Mapping[str, Sequence[int]], subscribers: Mapping[str, Sequence[str]], owners: Mapping[Queue, str]
) -> dict[Queue, str]:
    """Assign queues by the queue ids and the subscribed members of each topic.

    Members with equal subscriptions differ by one queue at most. A queue stays with its owner in `owners` unless that
    would be unbalanced. Topics without subscribers are left out.
    """
    shared: dict[Queue, str] = {}
    by_member: dict[str, dict[str, list[Queue]]] = defaultdict(lambda: defaultdict(list))
    load: dict[str, int] = {member: 0 for members in subscribers.values() for member in members}
    free: dict[str, list[Queue]] = {}
    for topic in sorted(queues):
        members = set(subscribers.get(topic, ()))
        for queue_id in sorted(queues[topic]) if members else ():
            queue = topic, queue_id
            owner = owners.get(queue)
            if owner in members:
                shared[queue] = owner
                by_member[owner][topic].append(queue)
                load[owner] += 1
            else:
                free.setdefault(topic, []).append(queue)
    for topic, left in free.items():
        _assign_free(left, subscribers[topic], shared, by_member, load)
    # A move in one topic may unbalance another, so all are repeated until nothing moves. This terminates: each move
    # lowers the sum of the squares of the loads.
    contested = [topic for topic in sorted(queues) if len(subscribers.get(topic, ())) > 1]
    while sum(_balance(topic, subscribers[topic], shared, by_member, load) for topic in contested):
        pass
    return shared


def _assign_free(
    left: Sequence[Queue],
    members: Sequence[str],
    shared: dict[Queue, str],
    by_member: dict[str, dict[str, list[Queue]]],
    load: dict[str, int],
) -> None:
    """Assign each free queue to the member with the fewest queues."""
    lightest = [(load[member], member) for member in members]
    heapq.heapify(lightest)
    for queue in left:
        _, member = lightest[0]
        shared[queue] = member
        by_member[member][queue[0]].append(queue)
        load[member] += 1
        heapq.heapreplace(lightest, (load[member], member))


def _balance(
    topic: str,
    members: Sequence[str],
    shared: dict[Queue, str],
    by_member: dict[str, dict[str, list[Queue]]],
    load: dict[str, int],
) -> int:
    """Move queues from the most to the least loaded members; returns the number of moves."""
    moves = 0
    lightest = [(load[member], member) for member in members]
    heaviest = [(-load[member], member) for member in members]
    heapq.heapify(lightest)
    heapq.heapify(heaviest)
    while heaviest:
        donor_load, donor = heaviest[0]
        if -donor_load != load[donor]:
            heapq.heapreplace(heaviest, (-load[donor], donor))
            continue
        if not by_member[donor][topic]:
            heapq.heappop(heaviest)
            continue
        receiver_load, receiver = lightest[0]
        if receiver_load != load[receiver]:
            heapq.heapreplace(lightest, (load[receiver], receiver))
            continue
        if load[donor] - load[receiver] <= 1:
            break
        queue = by_member[donor][topic].pop()
        by_member[receiver][topic].append(queue)
        shared[queue] = receiver
        load[donor] -= 1
        load[receiver] += 1
        moves += 1
    return moves
