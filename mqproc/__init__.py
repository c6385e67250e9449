"""RocketMQ's storage engine as a group of Python processes on one machine.

    with mqproc.Client("/var/lib/store") as client:
        client.send("orders", b"first", keys="order-1", tag="new")

Names are imported on first use: commands import this package first, and then handle Ctrl-C properly.
"""

import importlib
import sys
from typing import TYPE_CHECKING

if sys.platform != "linux":
    raise ImportError(
        f"mqproc requires Linux, and this is {sys.platform}: run it in a container, as by "
        "docker run -it -v $PWD:/work -w /work python:3.13 bash"
    )

# First, so that it sees the files as all other imports do.
from mqproc.util.sources import AT_IMPORT as _AT_IMPORT  # noqa: F401

# Of errors and types, `__all__` selects the public names.
# ruff: noqa: F403, F405
if TYPE_CHECKING:
    from mqproc.arrow.reading import ArrowStream, AsyncArrowStream
    from mqproc.client._async.client import AsyncClient, JoiningConsumer
    from mqproc.client._async.consumer import AsyncConsumer, AsyncSimpleConsumer
    from mqproc.client._async.groups import AsyncGroups
    from mqproc.client._async.producer import AsyncProducer, AsyncSendHandle
    from mqproc.client._async.transactions import AsyncTransaction, AsyncTransactionProducer, AsyncTransactions
    from mqproc.client._sync.client import Client
    from mqproc.client._sync.consumer import Consumer, SimpleConsumer
    from mqproc.client._sync.groups import Groups
    from mqproc.client._sync.producer import Producer, SendHandle
    from mqproc.client._sync.transactions import Transaction, TransactionProducer, Transactions
    from mqproc.client.arrow import ArrowPullResult
    from mqproc.client.batch import Batch
    from mqproc.client.group_requests import Move, ResetTo
    from mqproc.client.replay import ReplayPosition, ReplayProgress
    from mqproc.client.requests import QueryMessageResult
    from mqproc.client.retry import RetryPolicy
    from mqproc.client.send_results import SendResults
    from mqproc.client.tracing import Trace, TracedCopy, TracedKey, TracedProgress
    from mqproc.embedded import open
    from mqproc.errors import *
    from mqproc.store.index.lookup import IndexAnswer
    from mqproc.store.read.reader import StoreReader
    from mqproc.store.read.records import Conditions, Visible
    from mqproc.types import *

    __version__: str

__all__ = [
    "ArrowPullResult",
    "ArrowStream",
    "AsyncArrowStream",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncGroups",
    "AsyncProducer",
    "AsyncSendHandle",
    "AsyncSimpleConsumer",
    "AsyncTransaction",
    "AsyncTransactionProducer",
    "AsyncTransactions",
    "BadLevelError",
    "BadMessageError",
    "BadPropertyError",
    "BadRequestError",
    "BadTimeError",
    "BadTopicError",
    "Batch",
    "BatchResult",
    "Client",
    "Conditions",
    "ConfigurationError",
    "Consumer",
    "CorruptStoreError",
    "DiskFullError",
    "FilterMismatchError",
    "FilterSyntaxError",
    "FlushFailedError",
    "FrameTooLargeError",
    "GroupInUseError",
    "GroupInfo",
    "GroupMember",
    "GroupNotFoundError",
    "GroupQueue",
    "GroupSummary",
    "Groups",
    "Health",
    "IndexAnswer",
    "InternalError",
    "JoiningConsumer",
    "Message",
    "MessageNotFoundError",
    "MessageTooLargeError",
    "Move",
    "MqprocError",
    "NoSuchQueueError",
    "NotAMemberError",
    "NotRunningError",
    "OffsetOutOfRangeError",
    "OffsetOverflowError",
    "OpenTransaction",
    "OtherVersionError",
    "PermissionDeniedError",
    "Producer",
    "PropertiesTooLargeError",
    "ProtocolError",
    "PullResult",
    "PullStatus",
    "QueryMessageResult",
    "QueueInfo",
    "ReplayPosition",
    "ReplayProgress",
    "RequestTimeoutError",
    "ResetTo",
    "RetryLaterError",
    "RetryPolicy",
    "SendHandle",
    "SendOutcomeUnknownError",
    "SendResult",
    "SendResults",
    "SendStatus",
    "SimpleConsumer",
    "SlowConsumerError",
    "SqlFilter",
    "StaleOffsetError",
    "StartError",
    "StoreAccessError",
    "StoreBusyError",
    "StoreLockedError",
    "StoreNotFoundError",
    "StoreReadOnlyError",
    "StoreReader",
    "StoredMessage",
    "TagFilter",
    "TooManyConnectionsError",
    "TooManyQueuesError",
    "TopicExistsError",
    "TopicInfo",
    "TopicNotFoundError",
    "TopicReservedError",
    "Trace",
    "TracedCopy",
    "TracedKey",
    "TracedProgress",
    "Transaction",
    "TransactionEndedError",
    "TransactionNotFoundError",
    "TransactionOverdueError",
    "TransactionProducer",
    "TransactionResolution",
    "Transactions",
    "UnknownCommandError",
    "UnsupportedVersionError",
    "Visible",
    "__version__",
    "open",
]

_CLIENT = {
    "Client": "client",
    "Consumer": "consumer",
    "Groups": "groups",
    "Producer": "producer",
    "SimpleConsumer": "consumer",
    "Transaction": "transactions",
    "TransactionProducer": "transactions",
    "Transactions": "transactions",
}
_LAZY = {
    "ArrowPullResult": "mqproc.client.arrow",
    "ArrowStream": "mqproc.arrow.reading",
    "AsyncArrowStream": "mqproc.arrow.reading",
    "AsyncSendHandle": "mqproc.client._async.producer",
    "Batch": "mqproc.client.batch",
    "Conditions": "mqproc.store.read.records",
    "IndexAnswer": "mqproc.store.index.lookup",
    "JoiningConsumer": "mqproc.client._async.client",
    "Move": "mqproc.client.group_requests",
    "QueryMessageResult": "mqproc.client.requests",
    "ReplayPosition": "mqproc.client.replay",
    "ReplayProgress": "mqproc.client.replay",
    "ResetTo": "mqproc.client.group_requests",
    "RetryPolicy": "mqproc.client.retry",
    "SendHandle": "mqproc.client._sync.producer",
    "SendResults": "mqproc.client.send_results",
    "StoreReader": "mqproc.store.read.reader",
    "Trace": "mqproc.client.tracing",
    "TracedCopy": "mqproc.client.tracing",
    "TracedKey": "mqproc.client.tracing",
    "TracedProgress": "mqproc.client.tracing",
    "Visible": "mqproc.store.read.records",
    "open": "mqproc.embedded",
    **{name: f"mqproc.client._sync.{module}" for name, module in _CLIENT.items()},
    **{f"Async{name}": f"mqproc.client._async.{module}" for name, module in _CLIENT.items()},
}
_MODULES = ("errors", "types")


def __getattr__(name: str) -> object:
    if name == "__version__":
        from mqproc.util.version import installed_version

        return installed_version()
    if name in _MODULES:
        return importlib.import_module(f"mqproc.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _LAZY.get(name) or f"mqproc.{'errors' if name.endswith('Error') else 'types'}"
    found = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
