"""An idle group uses little memory: processes share modules loaded by the template."""

from __future__ import annotations

from collections.abc import Callable

from mqproc.cli.admin.lifecycle import group_status
from mqproc.layout import control as words_of
from tests.support.group import Group

IDLE_BYTES_MAX = 250_000_000


def test_idle_group_memory_is_below_250_mb(make_group: Callable[..., Group]) -> None:
    group = make_group(max_hash_slot_num=5_000_000, max_index_num=20_000_000, max_queues=65_536)
    with group.client() as client:
        client.send_batch("orders", [b"x" * 200] * 2000, keys=[f"k{n}" for n in range(2000)])
        client.wait_dispatched()
        assert len(list(client.by_key("orders", "k7"))) == 1
    found = group_status(group.paths, 30.0)
    memory = {role["role"]: role["pss_bytes"] for role in found["roles"]}
    assert set(memory) == {words_of.SUPERVISOR, words_of.TEMPLATE, *words_of.ROLES}
    assert all(memory.values()), memory
    print({name: f"{size / 1e6:.1f} MB" for name, size in memory.items()}, f"{found['pss_bytes'] / 1e6:.0f} MB in all")
    assert found["pss_bytes"] < IDLE_BYTES_MAX, memory
