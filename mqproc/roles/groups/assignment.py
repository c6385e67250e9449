"""How the queues of a group are shared among its members: evenly, and with as few moves as that allows.

Nothing here knows processes, sockets or time.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence

Queue = tuple[str, int]
"""Topic and queue id."""


def share(
    queues: Mapping[str, Sequence[int]], subscribers: Mapping[str, Sequence[str]], owners: Mapping[Queue, str]
) -> dict[Queue, str]:
    """Who shall have each queue, by the queue ids of each topic and the members that want it.

    Members that want the same topics differ by one queue at most. A queue stays with who is named in `owners` unless
    that is too uneven. A topic that nobody wants is left out.
    """
    shared: dict[Queue, str] = {}
    of_member: dict[str, dict[str, list[Queue]]] = defaultdict(lambda: defaultdict(list))
    load: dict[str, int] = {member: 0 for members in subscribers.values() for member in members}
    free: dict[str, list[Queue]] = {}
    for topic in sorted(queues):
        members = set(subscribers.get(topic, ()))
        for queue_id in sorted(queues[topic]) if members else ():
            queue = topic, queue_id
            owner = owners.get(queue)
            if owner in members:
                shared[queue] = owner
                of_member[owner][topic].append(queue)
                load[owner] += 1
            else:
                free.setdefault(topic, []).append(queue)
    for topic, left in free.items():
        _give(left, subscribers[topic], shared, of_member, load)
    # A move of one topic may make another uneven, so all are looked at until nothing moves: each move lowers the sum of
    # the squares of the loads.
    contested = [topic for topic in sorted(queues) if len(subscribers.get(topic, ())) > 1]
    while sum(_even_out(topic, subscribers[topic], shared, of_member, load) for topic in contested):
        pass
    return shared


def _give(
    left: Sequence[Queue],
    members: Sequence[str],
    shared: dict[Queue, str],
    of_member: dict[str, dict[str, list[Queue]]],
    load: dict[str, int],
) -> None:
    """Queues that nobody has, each to the member that has the fewest."""
    least = [(load[member], member) for member in members]
    heapq.heapify(least)
    for queue in left:
        _, member = least[0]
        shared[queue] = member
        of_member[member][queue[0]].append(queue)
        load[member] += 1
        heapq.heapreplace(least, (load[member], member))


def _even_out(
    topic: str,
    members: Sequence[str],
    shared: dict[Queue, str],
    of_member: dict[str, dict[str, list[Queue]]],
    load: dict[str, int],
) -> int:
    """Move queues of a topic from members that have many to those that have few; how many were moved."""
    moves = 0
    least = [(load[member], member) for member in members]
    most = [(-load[member], member) for member in members]
    heapq.heapify(least)
    heapq.heapify(most)
    while most:
        giver_load, giver = most[0]
        if -giver_load != load[giver]:
            heapq.heapreplace(most, (-load[giver], giver))
            continue
        if not of_member[giver][topic]:
            heapq.heappop(most)
            continue
        taker_load, taker = least[0]
        if taker_load != load[taker]:
            heapq.heapreplace(least, (load[taker], taker))
            continue
        if load[giver] - load[taker] <= 1:
            break
        queue = of_member[giver][topic].pop()
        of_member[taker][topic].append(queue)
        shared[queue] = taker
        load[giver] -= 1
        load[taker] += 1
        moves += 1
    return moves
