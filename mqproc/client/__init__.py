"""Clients of a running store: `Client` and `AsyncClient` over one protocol without I/O."""

import importlib
from typing import TYPE_CHECKING

from mqproc.client.core import Page, QueryMessageResult
from mqproc.client.encoding import Batch
from mqproc.client.producer import Producer
from mqproc.client.retry import NO_RETRY, RetryPolicy
from mqproc.client.sync import Client

if TYPE_CHECKING:
    from mqproc.client.aio import AsyncClient
    from mqproc.client.aio_producer import AsyncProducer
    from mqproc.client.arrow import ArrowPullResult

__all__ = [
    "NO_RETRY",
    "ArrowPullResult",
    "AsyncClient",
    "AsyncProducer",
    "Batch",
    "Client",
    "Page",
    "Producer",
    "QueryMessageResult",
    "RetryPolicy",
]

# asyncio and pyarrow are not imported before somebody asks for what needs them.
_LAZY = {
    "ArrowPullResult": "mqproc.client.arrow",
    "AsyncClient": "mqproc.client.aio",
    "AsyncProducer": "mqproc.client.aio_producer",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
