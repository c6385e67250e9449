"""Clients of a running store: `Client` and `AsyncClient` over one protocol without I/O."""

import importlib
from typing import TYPE_CHECKING

from mqproc.client._sync.client import Client
from mqproc.client._sync.consumer import Consumer
from mqproc.client._sync.groups import Groups
from mqproc.client._sync.producer import Producer
from mqproc.client._sync.transactions import Transaction, TransactionProducer, Transactions
from mqproc.client.batch import Batch
from mqproc.client.group_requests import Move, ResetTo
from mqproc.client.requests import Page, QueryMessageResult
from mqproc.client.retry import NO_RETRY, RetryPolicy

if TYPE_CHECKING:
    from mqproc.client._async.client import AsyncClient
    from mqproc.client._async.consumer import AsyncConsumer
    from mqproc.client._async.groups import AsyncGroups
    from mqproc.client._async.producer import AsyncProducer
    from mqproc.client._async.transactions import AsyncTransaction, AsyncTransactionProducer, AsyncTransactions
    from mqproc.client.arrow import ArrowPullResult

__all__ = [
    "NO_RETRY",
    "ArrowPullResult",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncGroups",
    "AsyncProducer",
    "AsyncTransaction",
    "AsyncTransactionProducer",
    "AsyncTransactions",
    "Batch",
    "Client",
    "Consumer",
    "Groups",
    "Move",
    "Page",
    "Producer",
    "QueryMessageResult",
    "ResetTo",
    "RetryPolicy",
    "Transaction",
    "TransactionProducer",
    "Transactions",
]

# asyncio and pyarrow are imported only for the names that need them.
_LAZY = {
    "ArrowPullResult": "mqproc.client.arrow",
    "AsyncClient": "mqproc.client._async.client",
    "AsyncConsumer": "mqproc.client._async.consumer",
    "AsyncGroups": "mqproc.client._async.groups",
    "AsyncProducer": "mqproc.client._async.producer",
    "AsyncTransaction": "mqproc.client._async.transactions",
    "AsyncTransactionProducer": "mqproc.client._async.transactions",
    "AsyncTransactions": "mqproc.client._async.transactions",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
