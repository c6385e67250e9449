"""RocketMQ's storage engine as a group of Python processes on one machine.

    with mqproc.Client("/var/lib/store") as client:
        client.send("orders", b"first", keys="order-1", tag="new")

All names are imported at their first use: commands, which import this first, take Ctrl-C in order from then on.
"""

import importlib
from typing import TYPE_CHECKING

# First of all, so that it is older than whatever else is imported.
from mqproc.began import IMPORTED_NS as _IMPORTED_NS  # noqa: F401

if TYPE_CHECKING:
    from mqproc.client.aio import AsyncClient
    from mqproc.client.aio_consumer import AsyncConsumer, JoiningConsumer
    from mqproc.client.aio_groups import AsyncGroups
    from mqproc.client.aio_producer import AsyncProducer
    from mqproc.client.aio_transactions import AsyncTransaction, AsyncTransactionProducer, AsyncTransactions
    from mqproc.client.arrow import ArrowPullResult
    from mqproc.client.batch import Batch
    from mqproc.client.consumer import Consumer
    from mqproc.client.core import QueryMessageResult
    from mqproc.client.group_steps import Move, ResetTo
    from mqproc.client.groups import Groups
    from mqproc.client.producer import Producer
    from mqproc.client.replay import ReplayPosition, ReplayProgress
    from mqproc.client.retry import RetryPolicy
    from mqproc.client.simple_consumer import AsyncSimpleConsumer, SimpleConsumer
    from mqproc.client.sync import Client
    from mqproc.client.tracing import Trace, TracedCopy, TracedKey, TracedProgress
    from mqproc.client.transactions import Transaction, TransactionProducer, Transactions
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
    from mqproc.groups import GroupInfo, GroupMember, GroupQueue, GroupSummary
    from mqproc.message import (
        BatchResult,
        Health,
        Message,
        PullResult,
        PullStatus,
        QueueInfo,
        SendResult,
        SendStatus,
        SqlFilter,
        StoredMessage,
        TagFilter,
        TopicInfo,
    )
    from mqproc.store.reads.index_query import IndexAnswer
    from mqproc.store.reads.log_records import Visible
    from mqproc.store.reads.log_scan import Conditions
    from mqproc.store.reads.reader import StoreReader
    from mqproc.transactions import OpenTransaction, TransactionResolution

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
    "AsyncClient": "mqproc.client.aio",
    "AsyncConsumer": "mqproc.client.aio_consumer",
    "AsyncGroups": "mqproc.client.aio_groups",
    "AsyncProducer": "mqproc.client.aio_producer",
    "AsyncSimpleConsumer": "mqproc.client.simple_consumer",
    "AsyncTransaction": "mqproc.client.aio_transactions",
    "AsyncTransactionProducer": "mqproc.client.aio_transactions",
    "AsyncTransactions": "mqproc.client.aio_transactions",
    "Batch": "mqproc.client.encoding",
    "BatchResult": "mqproc.message",
    "Client": "mqproc.client.sync",
    "Conditions": "mqproc.store.reads.log_scan",
    "Consumer": "mqproc.client.consumer",
    "GroupInfo": "mqproc.groups",
    "GroupMember": "mqproc.groups",
    "GroupQueue": "mqproc.groups",
    "GroupSummary": "mqproc.groups",
    "Groups": "mqproc.client.groups",
    "Health": "mqproc.message",
    "IndexAnswer": "mqproc.store.reads.index_query",
    "JoiningConsumer": "mqproc.client.aio_consumer",
    "Message": "mqproc.message",
    "Move": "mqproc.client.group_steps",
    "OpenTransaction": "mqproc.transactions",
    "Producer": "mqproc.client.producer",
    "PullResult": "mqproc.message",
    "PullStatus": "mqproc.message",
    "QueryMessageResult": "mqproc.client.core",
    "QueueInfo": "mqproc.message",
    "ReplayPosition": "mqproc.client.replay",
    "ReplayProgress": "mqproc.client.replay",
    "ResetTo": "mqproc.client.group_steps",
    "RetryPolicy": "mqproc.client.retry",
    "SendResult": "mqproc.message",
    "SendStatus": "mqproc.message",
    "SimpleConsumer": "mqproc.client.simple_consumer",
    "SqlFilter": "mqproc.message",
    "StoreReader": "mqproc.store.reads.reader",
    "StoredMessage": "mqproc.message",
    "TagFilter": "mqproc.message",
    "TopicInfo": "mqproc.message",
    "Trace": "mqproc.client.tracing",
    "TracedCopy": "mqproc.client.tracing",
    "TracedKey": "mqproc.client.tracing",
    "TracedProgress": "mqproc.client.tracing",
    "Transaction": "mqproc.client.transactions",
    "TransactionProducer": "mqproc.client.transactions",
    "TransactionResolution": "mqproc.transactions",
    "Transactions": "mqproc.client.transactions",
    "Visible": "mqproc.store.reads.log_records",
    "open": "mqproc.embedded",
} | {name: "mqproc.errors" for name in __all__ if name.endswith("Error")}
_MODULES = ("errors", "groups", "message", "transactions")


def __getattr__(name: str) -> object:
    if name == "__version__":
        from mqproc.version import installed_version

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
