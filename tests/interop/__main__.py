"""Create golden stores with RocketMQ: `python -m tests.interop j_pop | k_timer`."""

from __future__ import annotations

import sys

from tests.interop.rocketmq import POP_STORE, TIMER_STORE, make_golden, make_pop_store, make_timer_store

MAKERS = {POP_STORE: make_pop_store, TIMER_STORE: make_timer_store}

if __name__ == "__main__":
    for name in sys.argv[1:]:
        make_golden(name, MAKERS[name])
