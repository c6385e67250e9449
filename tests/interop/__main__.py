"""Create golden stores with RocketMQ: `python -m tests.interop RELEASE [NAME…]`."""

from __future__ import annotations

import sys

from tests.interop import rocketmq
from tests.interop.golden_maker import make_stores

MAKERS = {
    rocketmq.POP_STORE: rocketmq.make_pop_store,
    rocketmq.TIMER_STORE: rocketmq.make_timer_store,
    rocketmq.KVSTORE: rocketmq.make_kvstore,
    rocketmq.ROCKSDB_TRANSACTIONS: rocketmq.make_rocksdb_transactions,
    rocketmq.ROCKSDB_TIMER: rocketmq.make_rocksdb_timer,
}

if __name__ == "__main__":
    version, *names = sys.argv[1:]
    if not names:
        make_stores(version, rocketmq.golden_of(version))
    for name in names or MAKERS:
        rocketmq.make_golden(name, MAKERS[name], version)
