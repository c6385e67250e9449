"""Clients of a running store: `Client` and `AsyncClient` over one protocol without I/O.

`mqproc` exports all public names; here are those that commands and benchmarks use.
"""

from mqproc.client._sync.client import Client
from mqproc.client._sync.consumer import Consumer
from mqproc.client._sync.producer import Producer
from mqproc.client.batch import Batch
from mqproc.client.group_requests import Move, ResetTo

__all__ = ["Batch", "Client", "Consumer", "Move", "Producer", "ResetTo"]
