"""Clients of a running store: `Client` and `AsyncClient` over one protocol without I/O."""

import importlib
from typing import TYPE_CHECKING

from mqproc.client.batch import Batch
from mqproc.client.consumer import Consumer
from mqproc.client.core import Page, QueryMessageResult
from mqproc.client.group_steps import Move, ResetTo
from mqproc.client.groups import Groups
from mqproc.client.producer import Producer
from mqproc.client.retry import NO_RETRY, RetryPolicy
from mqproc.client.sync import Client
from mqproc.client.transactions import Transaction, TransactionProducer, Transactions

if TYPE_CHECKING:
    from mqproc.client.aio import AsyncClient
    from mqproc.client.aio_consumer import AsyncConsumer
    from mqproc.client.aio_groups import AsyncGroups
    from mqproc.client.aio_producer import AsyncProducer
    from mqproc.client.aio_transactions import AsyncTransaction, AsyncTransactionProducer, AsyncTransactions
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

# asyncio and pyarrow are not imported before somebody asks for what needs them.
_LAZY = {
    "ArrowPullResult": "mqproc.client.arrow",
    "AsyncClient": "mqproc.client.aio",
    "AsyncConsumer": "mqproc.client.aio_consumer",
    "AsyncGroups": "mqproc.client.aio_groups",
    "AsyncProducer": "mqproc.client.aio_producer",
    "AsyncTransaction": "mqproc.client.aio_transactions",
    "AsyncTransactionProducer": "mqproc.client.aio_transactions",
    "AsyncTransactions": "mqproc.client.aio_transactions",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
