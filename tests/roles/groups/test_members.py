"""Ownership of queues: exclusive, handed over on release or timeout, fenced by epochs."""

from __future__ import annotations

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from mqproc.roles.groups.members import GroupMembers, MemberSession

SECOND = 1_000_000_000


class Epochs:
    """Offsets as in the offset file."""

    def __init__(self) -> None:
        self.next = 1

    def take(self, above: int = 0) -> int:
        epoch = max(self.next, above + 1)
        self.next = epoch + 1
        return epoch


def member(name: str, *topics: str, now_ns: int = 0) -> MemberSession:
    return MemberSession(name, name, topics or ("T",), 10 * SECOND, now_ns, owner=name)


def ids(group: GroupMembers, name: str) -> list[int]:
    return [queue_id for (_, queue_id), _ in group.queues_of(name)]


def test_members_single_member_gets_all_queues() -> None:
    group = GroupMembers(Epochs().take)
    group.join(member("a"))
    assert group.rebalance({"T": range(4)}, 0)
    assert ids(group, "a") == [0, 1, 2, 3]
    assert not group.rebalance({"T": range(4)}, 0)


def test_members_queue_moves_only_after_its_release() -> None:
    group = GroupMembers(Epochs().take)
    group.join(member("a"))
    group.rebalance({"T": range(4)}, 0)
    epochs = dict(group.queues_of("a"))
    group.join(member("b"))
    assert group.rebalance({"T": range(4)}, 0)
    kept = ids(group, "a")
    assert (len(kept), ids(group, "b")) == (2, [])
    taken = {("T", queue_id) for queue_id in set(range(4)) - set(kept)}
    # Revoked queues accept commits until they are released, and not afterwards.
    assert all(group.may_commit("a", queue, epochs[queue]) for queue in taken)
    assert group.release("a", group.members["a"].generation - 1) == 0
    assert group.release("a", group.members["a"].generation) == 2
    assert group.rebalance({"T": range(4)}, 0)
    assert {queue for queue, _ in group.queues_of("b")} == taken
    assert not any(group.may_commit("a", queue, epochs[queue]) for queue in taken)
    assert not any(group.may_commit("b", queue, epochs[queue]) for queue in taken)


def test_members_late_release_loses_the_queue() -> None:
    group = GroupMembers(Epochs().take)
    group.join(member("a"))
    group.rebalance({"T": range(2)}, 0)
    group.join(member("b"))
    group.rebalance({"T": range(2)}, 0)
    assert group.free_overdue(10 * SECOND) == 0
    assert group.free_overdue(10 * SECOND + 1) == 1
    group.rebalance({"T": range(2)}, 0)
    assert len(ids(group, "b")) == 1


def test_members_departed_member_frees_its_queues() -> None:
    group = GroupMembers(Epochs().take)
    for name in "ab":
        group.join(member(name))
    group.rebalance({"T": range(4)}, 0)
    group.leave("a")
    group.rebalance({"T": range(4)}, 0)
    assert ids(group, "b") == [0, 1, 2, 3]


def test_members_returning_members_keep_their_queues() -> None:
    epochs = Epochs()
    group = GroupMembers(epochs.take)
    group.join(member("b"), [("T", 1, 70), ("T", 3, 71)])
    group.join(member("a"), [("T", 0, 80), ("T", 1, 5)])
    group.rebalance({"T": range(4)}, 0)
    assert [queue for queue in group.queues_of("b") if queue[1] < 80] == [(("T", 1), 70), (("T", 3), 71)]
    assert dict(group.queues_of("a"))["T", 0] == 80
    assert ids(group, "a") == [0, 2]
    assert epochs.next > 81


def test_members_returning_late_get_queues_with_new_epochs() -> None:
    """The old epoch is stale: the owner may have moved back, and no commit may pass that."""
    group = GroupMembers(Epochs().take)
    group.join(member("a"))
    group.rebalance({"T": range(2)}, 0)
    old = dict(group.queues_of("a"))
    group.leave("a")
    group.join(member("b"), [("T", 0, old["T", 0])])
    group.rebalance({"T": range(2)}, 0)
    between = dict(group.queues_of("b"))
    assert between["T", 0] == old["T", 0], "the owner with the newest epoch keeps it"
    assert between["T", 1] > old["T", 1]
    group.leave("b")
    group.join(member("a"), [("T", queue_id, old["T", queue_id]) for queue_id in range(2)])
    group.rebalance({"T": range(2)}, 0)
    after = dict(group.queues_of("a"))
    assert after["T", 1] > between["T", 1]
    assert not group.may_commit("a", ("T", 1), old["T", 1])
    assert group.may_commit("a", ("T", 1), after["T", 1])


def test_members_two_claims_of_a_queue_newer_epoch_wins() -> None:
    """After a restart of the coordinator, members rejoin in any order."""
    group = GroupMembers(Epochs().take)
    assert not group.join(member("late"), [("T", 0, 70), ("T", 1, 71)])
    before = group.members["late"].generation
    assert group.join(member("new"), [("T", 0, 90)])
    assert group.members["late"].generation > before, "the loss is reported"
    group.rebalance({"T": range(2)}, 0)
    assert (group.queues_of("late"), group.queues_of("new")) == ([(("T", 1), 71)], [(("T", 0), 90)])
    assert not group.may_commit("late", ("T", 0), 70)
    assert not group.join(member("late"), [("T", 0, 70), ("T", 1, 71)])
    assert group.holder_of(("T", 0)) == "new"


def test_members_reset_of_unowned_queue_applies_to_returning_owner() -> None:
    epochs, newest_epochs = Epochs(), dict[tuple[str, int], int]()
    group = GroupMembers(epochs.take, newest_epochs)
    group.join(member("a"))
    group.rebalance({"T": range(2)}, 0)
    old = dict(group.queues_of("a"))
    group.leave("a")
    assert not GroupMembers(epochs.take, newest_epochs).renew_epochs([("T", 1)])
    group = GroupMembers(epochs.take, newest_epochs)
    group.join(member("a"), [("T", queue_id, epoch) for (_, queue_id), epoch in old.items()])
    assert dict(group.queues_of("a")) == {("T", 0): old["T", 0]}


def test_members_reset_gives_the_queue_a_new_epoch() -> None:
    group = GroupMembers(Epochs().take)
    group.join(member("a"))
    group.rebalance({"T": range(2)}, 0)
    before, generation = dict(group.queues_of("a")), group.generation
    assert group.renew_epochs([("T", 1), ("U", 0)])
    after = dict(group.queues_of("a"))
    assert after["T", 0] == before["T", 0]
    assert after["T", 1] > before["T", 1]
    assert group.members["a"].generation > generation
    assert not group.may_commit("a", ("T", 1), before["T", 1])


def test_members_reset_is_not_undone_by_a_releasing_member() -> None:
    group = GroupMembers(Epochs().take)
    group.join(member("a"))
    group.rebalance({"T": range(2)}, 0)
    before = dict(group.queues_of("a"))
    group.join(member("b"))
    group.rebalance({"T": range(2)}, 0)
    (moving,) = set(before) - set(dict(group.queues_of("a")))
    generation = group.generation
    assert group.may_commit("a", moving, before[moving])
    assert not group.renew_epochs([moving]), "no member is notified: the next owner starts at the reset"
    assert not group.may_commit("a", moving, before[moving])
    assert group.release("a", generation) == 1
    group.rebalance({"T": range(2)}, 0)
    assert dict(group.queues_of("b")).keys() == {moving}


def test_members_deleted_topic_queues_are_revoked() -> None:
    group = GroupMembers(Epochs().take)
    group.join(member("a"))
    group.rebalance({"T": range(2)}, 0)
    assert group.rebalance({"T": []}, 0)
    assert ids(group, "a") == []


class Life(RuleBasedStateMachine):
    """Joins, deaths, releases and times in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.group = GroupMembers(Epochs().take)
        self.names = itertools.count()
        self.now_ns = 0
        self.seen: dict[tuple[tuple[str, int], int], str] = {}

    def await_predecessor(self) -> None:
        self.group.rebalance({"T": range(9), "U": range(3)}, self.now_ns)

    @rule(topics=st.sampled_from([("T",), ("T", "U"), ("U",)]))
    def join(self, topics: tuple[str, ...]) -> None:
        if len(self.group.members) < 6:
            self.group.join(member(f"m{next(self.names)}", *topics, now_ns=self.now_ns))
            self.await_predecessor()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.group.members:
            self.group.leave(data.draw(st.sampled_from(sorted(self.group.members))))
            self.await_predecessor()

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        if self.group.members:
            name = data.draw(st.sampled_from(sorted(self.group.members)))
            self.group.release(name, self.group.members[name].generation)
            self.await_predecessor()

    @rule(seconds=st.integers(0, 12))
    def time_passes(self, seconds: int) -> None:
        self.now_ns += seconds * SECOND
        self.group.free_overdue(self.now_ns)
        self.await_predecessor()

    @invariant()
    def an_epoch_belongs_to_one_member(self) -> None:
        for queue, of in self.group.holdings.items():
            assert self.seen.setdefault((queue, of.epoch), of.member_id) == of.member_id
            assert of.member_id in self.group.members

    @invariant()
    def queues_of_all_are_those_of_each(self) -> None:
        found = {name: queues for name in self.group.members if (queues := self.group.queues_of(name))}
        assert self.group.queues_by_member() == found

    @invariant()
    def everything_is_shared_evenly_once_released(self) -> None:
        if any(of.revoked_in for of in self.group.holdings.values()):
            return
        wanted = {("T", number) for number in range(9)} if "T" in self.group.topics else set()
        wanted |= {("U", number) for number in range(3)} if "U" in self.group.topics else set()
        assert set(self.group.holdings) == wanted


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
