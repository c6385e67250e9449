"""A consumer process for tests: store, name, file for consumed messages, group, topic, session timeout in seconds."""

from __future__ import annotations

import sys

from mqproc.client import Client

store, name, seen_path, group, topic, session = sys.argv[1:]
with (
    Client(store) as client,
    open(seen_path, "a", buffering=1) as seen,
    client.consumer(group, topic, name=name, session_timeout=float(session)) as consumer,
):
    for message in consumer:
        seen.write(message.body.decode() + "\n")
