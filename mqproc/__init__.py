"""RocketMQ's storage engine as a group of Python processes on one machine.

    with mqproc.Client("/var/lib/store") as client:
        client.send("orders", b"first", keys="order-1", tag="new")

Names are imported on first use: commands import this package first, and then handle Ctrl-C properly.
"""

import importlib
from typing import TYPE_CHECKING

# First, so that its time precedes all other imports.
from mqproc.util.version import IMPORTED_NS as _IMPORTED_NS  # noqa: F401

if TYPE_CHECKING:
    from mqproc.client._async.client import AsyncClient, JoiningConsumer
    from mqproc.client._async.consumer import AsyncConsumer
    from mqproc.client._async.groups import AsyncGroups
    from mqproc.client._async.producer import AsyncProducer
    from mqproc.client._async.simple_consumer import AsyncSimpleConsumer
    from mqproc.client._async.transactions import AsyncTransaction, AsyncTransactionProducer, AsyncTransactions
    from mqproc.client._sync.client import Client
    from mqproc.client._sync.consumer import Consumer
    from mqproc.client._sync.groups import Groups
    from mqproc.client._sync.producer import Producer
    from mqproc.client._sync.simple_consumer import SimpleConsumer
    from mqproc.client._sync.transactions import Transaction, TransactionProducer, Transactions
    from mqproc.client.arrow import ArrowPullResult
    from mqproc.client.batch import Batch
    from mqproc.client.group_requests import Move, ResetTo
    from mqproc.client.replay import ReplayPosition, ReplayProgress
    from mqproc.client.requests import QueryMessageResult
    from mqproc.client.retry import RetryPolicy
    from mqproc.client.tracing import Trace, TracedCopy, TracedKey, TracedProgress
    from mqproc.embedded import open
    from mqproc.errors import (
        BadLevelError,
        BadMessageError,
        BadPropertyError,
        BadRequestError,
        BadTimeError,
        BadTopicError,
        ConfigurationError,
        CorruptStoreError,
        DiskFullError,
        FilterSyntaxError,
        FlushFailedError,
        FrameTooLargeError,
        GroupInUseError,
        GroupNotFoundError,
        InternalError,
        MessageNotFoundError,
        MessageTooLargeError,
        MqprocError,
        NoSuchQueueError,
        NotAMemberError,
        NotRunningError,
        OffsetOutOfRangeError,
        OffsetOverflowError,
        OtherVersionError,
        PermissionDeniedError,
        PropertiesTooLargeError,
        ProtocolError,
        RequestTimeoutError,
        RetryLaterError,
        SendOutcomeUnknownError,
        SlowConsumerError,
        StaleOffsetError,
        StartError,
        StoreAccessError,
        StoreBusyError,
        StoreLockedError,
        StoreNotFoundError,
        StoreReadOnlyError,
        TooManyConnectionsError,
        TooManyQueuesError,
        TopicExistsError,
        TopicNotFoundError,
        TopicReservedError,
        TransactionEndedError,
        TransactionNotFoundError,
        TransactionOverdueError,
        UnknownCommandError,
        UnsupportedVersionError,
    )
    from mqproc.store.index.lookup import IndexAnswer
    from mqproc.store.read.reader import StoreReader
    from mqproc.store.read.records import Visible
    from mqproc.store.read.scan import Conditions
    from mqproc.types import (
        BatchResult,
        GroupInfo,
        GroupMember,
        GroupQueue,
        GroupSummary,
        Health,
        Message,
        OpenTransaction,
        PullResult,
        PullStatus,
        QueueInfo,
        SendResult,
        SendStatus,
        SqlFilter,
        StoredMessage,
        TagFilter,
        TopicInfo,
        TransactionResolution,
    )

    __version__: str

__all__ = [
    "ArrowPullResult",
    "AsyncClient",
    "AsyncConsumer",
    "AsyncGroups",
    "AsyncProducer",
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
    "SendOutcomeUnknownError",
    "SendResult",
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

_LAZY = {
    "ArrowPullResult": "mqproc.client.arrow",
    "AsyncClient": "mqproc.client._async.client",
    "AsyncConsumer": "mqproc.client._async.consumer",
    "AsyncGroups": "mqproc.client._async.groups",
    "AsyncProducer": "mqproc.client._async.producer",
    "AsyncSimpleConsumer": "mqproc.client._async.simple_consumer",
    "AsyncTransaction": "mqproc.client._async.transactions",
    "AsyncTransactionProducer": "mqproc.client._async.transactions",
    "AsyncTransactions": "mqproc.client._async.transactions",
    "Batch": "mqproc.client.batch",
    "BatchResult": "mqproc.types",
    "Client": "mqproc.client._sync.client",
    "Conditions": "mqproc.store.read.scan",
    "Consumer": "mqproc.client._sync.consumer",
    "GroupInfo": "mqproc.types",
    "GroupMember": "mqproc.types",
    "GroupQueue": "mqproc.types",
    "GroupSummary": "mqproc.types",
    "Groups": "mqproc.client._sync.groups",
    "Health": "mqproc.types",
    "IndexAnswer": "mqproc.store.index.lookup",
    "JoiningConsumer": "mqproc.client._async.client",
    "Message": "mqproc.types",
    "Move": "mqproc.client.group_requests",
    "OpenTransaction": "mqproc.types",
    "Producer": "mqproc.client._sync.producer",
    "PullResult": "mqproc.types",
    "PullStatus": "mqproc.types",
    "QueryMessageResult": "mqproc.client.requests",
    "QueueInfo": "mqproc.types",
    "ReplayPosition": "mqproc.client.replay",
    "ReplayProgress": "mqproc.client.replay",
    "ResetTo": "mqproc.client.group_requests",
    "RetryPolicy": "mqproc.client.retry",
    "SendResult": "mqproc.types",
    "SendStatus": "mqproc.types",
    "SimpleConsumer": "mqproc.client._sync.simple_consumer",
    "SqlFilter": "mqproc.types",
    "StoreReader": "mqproc.store.read.reader",
    "StoredMessage": "mqproc.types",
    "TagFilter": "mqproc.types",
    "TopicInfo": "mqproc.types",
    "Trace": "mqproc.client.tracing",
    "TracedCopy": "mqproc.client.tracing",
    "TracedKey": "mqproc.client.tracing",
    "TracedProgress": "mqproc.client.tracing",
    "Transaction": "mqproc.client._sync.transactions",
    "TransactionProducer": "mqproc.client._sync.transactions",
    "TransactionResolution": "mqproc.types",
    "Transactions": "mqproc.client._sync.transactions",
    "Visible": "mqproc.store.read.records",
    "open": "mqproc.embedded",
} | {name: "mqproc.errors" for name in __all__ if name.endswith("Error")}
_MODULES = ("errors", "types")


def __getattr__(name: str) -> object:
    if name == "__version__":
        from mqproc.util.version import installed_version

        return installed_version()
    if name in _MODULES:
        return importlib.import_module(f"mqproc.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return __all__
