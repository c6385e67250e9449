"""All errors that mqproc raises: one tree, each with its code on the wire.

    MqprocError
    ├── ConfigurationError          CONFIGURATION         exit 8
    ├── StoreLockedError            STORE_LOCKED          exit 7
    ├── CorruptStoreError           CORRUPT               exit 6
    │   └── OtherVersionError       OTHER_VERSION         exit 3
    ├── StoreAccessError            STORE_ACCESS          exit 3
    │   └── StoreNotFoundError      STORE_NOT_FOUND       exit 5
    ├── StartError                  START_FAILED          exit 3
    ├── NotRunningError             NOT_RUNNING           exit 9
    ├── RequestTimeoutError         TIMEOUT               exit 4
    ├── SendOutcomeUnknownError     OUTCOME_UNKNOWN       exit 4
    ├── ProtocolError               BAD_FRAME
    │   ├── FrameTooLargeError      FRAME_TOO_LARGE
    │   ├── UnsupportedVersionError UNSUPPORTED_VERSION
    │   └── UnknownCommandError     UNKNOWN_COMMAND
    ├── BadRequestError             BAD_REQUEST           exit 2
    │   ├── BadTopicError           BAD_TOPIC
    │   ├── TopicReservedError      TOPIC_RESERVED
    │   ├── BadMessageError         BAD_MESSAGE
    │   ├── BadPropertyError        BAD_PROPERTY
    │   ├── MessageTooLargeError    MESSAGE_TOO_LARGE
    │   ├── PropertiesTooLargeError PROPERTIES_TOO_LARGE
    │   ├── NoSuchQueueError        NO_SUCH_QUEUE
    │   ├── BadLevelError           BAD_LEVEL
    │   ├── BadTimeError            BAD_TIME
    │   └── FilterSyntaxError       BAD_FILTER
    ├── TopicNotFoundError          TOPIC_NOT_FOUND       exit 5
    ├── TopicExistsError            TOPIC_EXISTS
    ├── MessageNotFoundError        MESSAGE_NOT_FOUND     exit 5
    ├── TooManyQueuesError          TOO_MANY_QUEUES
    ├── OffsetOutOfRangeError       OFFSET_OUT_OF_RANGE
    │   ├── OffsetOverflowError     OFFSET_OVERFLOW
    │   └── StaleOffsetError        STALE_OFFSET
    ├── GroupNotFoundError          GROUP_NOT_FOUND       exit 5
    ├── GroupInUseError             GROUP_IN_USE
    ├── NotAMemberError             NOT_A_MEMBER
    ├── StoreBusyError              STORE_BUSY            retryable
    │   ├── RetryLaterError         RETRY_LATER           retryable
    │   └── TooManyConnectionsError TOO_MANY_CONNECTIONS  retryable
    ├── SlowConsumerError           SLOW_CONSUMER
    ├── DiskFullError               DISK_FULL             retryable
    ├── StoreReadOnlyError          STORE_READ_ONLY
    ├── FlushFailedError            FLUSH_FAILED
    ├── PermissionDeniedError       PERMISSION_DENIED
    ├── InternalError               INTERNAL
    ├── TransactionNotFoundError    TRANSACTION_NOT_FOUND exit 5
    ├── TransactionEndedError       TRANSACTION_ENDED
    └── TransactionOverdueError     ILLEGAL_OPERATION

`retryable`: the request was surely not executed, and may succeed later.
"""

from __future__ import annotations

from typing import ClassVar


class MqprocError(Exception):
    """Base class with the code on the wire, the command's exit code, and when to retry."""

    code: ClassVar[str] = "ERROR"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, *, hint_ms: int = 0) -> None:
        super().__init__(message)
        self.hint_ms = hint_ms


class ConfigurationError(MqprocError):
    """Invalid value of an option; the text names option, value and allowed range."""

    code = "CONFIGURATION"
    exit_code = 8


class StoreLockedError(MqprocError):
    """Another process, of mqproc or RocketMQ, holds the store's lock."""

    code = "STORE_LOCKED"
    exit_code = 7


class CorruptStoreError(MqprocError):
    """Invalid bytes on disk; the text names file, offset, expected and found."""

    code = "CORRUPT"
    exit_code = 6


class OtherVersionError(CorruptStoreError):
    """Written by another version of mqproc; nothing is damaged."""

    code = "OTHER_VERSION"
    exit_code = 3


class StoreAccessError(MqprocError):
    """The store's path is not a folder, belongs to another user, or is not writable."""

    code = "STORE_ACCESS"
    exit_code = 3


class StoreNotFoundError(StoreAccessError):
    """No folder, or no store, at the given path."""

    code = "STORE_NOT_FOUND"
    exit_code = 5


class StartError(MqprocError):
    """The group, or one of its roles, could not start."""

    code = "START_FAILED"
    exit_code = 3


class NotRunningError(MqprocError):
    """No group runs on this store."""

    code = "NOT_RUNNING"
    exit_code = 9


class RequestTimeoutError(MqprocError):
    """No answer in time to a request without side effects."""

    code = "TIMEOUT"
    exit_code = 4


class SendOutcomeUnknownError(MqprocError):
    """The connection was lost after a send: the messages may or may not be stored."""

    code = "OUTCOME_UNKNOWN"
    exit_code = 4


class ProtocolError(MqprocError):
    """The peer sent an invalid frame."""

    code = "BAD_FRAME"


class FrameTooLargeError(ProtocolError):
    """A frame is larger than `max_frame_bytes`."""

    code = "FRAME_TOO_LARGE"


class UnsupportedVersionError(ProtocolError):
    """The peer uses another protocol version."""

    code = "UNSUPPORTED_VERSION"


class UnknownCommandError(ProtocolError):
    """Unknown operation number; the connection stays open."""

    code = "UNKNOWN_COMMAND"


class BadRequestError(MqprocError):
    """Invalid values in a request; nothing was done."""

    code = "BAD_REQUEST"
    exit_code = 2


class BadTopicError(BadRequestError):
    """A topic's name is empty, too long, or has a byte outside RocketMQ's set."""

    code = "BAD_TOPIC"


class TopicReservedError(BadRequestError):
    """Clients may not send to this topic, or not create or delete it."""

    code = "TOPIC_RESERVED"


class BadMessageError(BadRequestError):
    """A message's columns contradict each other."""

    code = "BAD_MESSAGE"


class BadPropertyError(BadRequestError):
    """A property's name or value has a separator byte, is empty, or is reserved."""

    code = "BAD_PROPERTY"


class MessageTooLargeError(BadRequestError):
    """A body exceeds `max_message_size`, or the record does not fit into a segment."""

    code = "MESSAGE_TOO_LARGE"


class PropertiesTooLargeError(BadRequestError):
    """Properties take more than 32,767 bytes."""

    code = "PROPERTIES_TOO_LARGE"


class NoSuchQueueError(BadRequestError):
    """A queue id is negative or not below the topic's number of queues."""

    code = "NO_SUCH_QUEUE"


class BadLevelError(BadRequestError):
    """A delay level is out of range."""

    code = "BAD_LEVEL"


class BadTimeError(BadRequestError):
    """A delivery time or delay is invalid, too far ahead, or its timer slot is full."""

    code = "BAD_TIME"


class FilterSyntaxError(BadRequestError):
    """Invalid filter; `position` counts characters from 0, the text from 1."""

    code = "BAD_FILTER"

    def __init__(self, message: str, *, position: int = 0, hint_ms: int = 0) -> None:
        super().__init__(message, hint_ms=hint_ms)
        self.position = position


class TopicNotFoundError(MqprocError):
    """No such topic."""

    code = "TOPIC_NOT_FOUND"
    exit_code = 5


class TopicExistsError(MqprocError):
    """The topic exists with other settings."""

    code = "TOPIC_EXISTS"


class MessageNotFoundError(MqprocError):
    """No message has this id, or it has been deleted by retention."""

    code = "MESSAGE_NOT_FOUND"
    exit_code = 5


class TooManyQueuesError(MqprocError):
    """The store already has `max_queues` queues."""

    code = "TOO_MANY_QUEUES"


class OffsetOutOfRangeError(MqprocError):
    """A queue offset is outside of [`min_offset`, `max_offset`)."""

    code = "OFFSET_OUT_OF_RANGE"

    def __init__(self, message: str, *, min_offset: int = 0, max_offset: int = 0, hint_ms: int = 0) -> None:
        super().__init__(message, hint_ms=hint_ms)
        self.min_offset = min_offset
        self.max_offset = max_offset


class OffsetOverflowError(OffsetOutOfRangeError):
    """A committed offset would exceed the queue's end; nothing was changed."""

    code = "OFFSET_OVERFLOW"


class StaleOffsetError(OffsetOutOfRangeError):
    """A committed offset would decrease, which only a reset may do; nothing was changed."""

    code = "STALE_OFFSET"


class GroupNotFoundError(MqprocError):
    """No such consumer group."""

    code = "GROUP_NOT_FOUND"
    exit_code = 5


class GroupInUseError(MqprocError):
    """The consumer group has members; nothing was changed."""

    code = "GROUP_IN_USE"


class NotAMemberError(MqprocError):
    """The consumer is no longer a member of its group, or no longer has the queue.

    It was silent for too long, or a rebalance assigned the queue to another member.
    """

    code = "NOT_A_MEMBER"


class StoreBusyError(MqprocError):
    """The store refuses work for now; nothing was stored; retry after `hint_ms`."""

    code = "STORE_BUSY"
    retryable = True


class RetryLaterError(StoreBusyError):
    """The role is restarting; nothing was changed; retry after `hint_ms`."""

    code = "RETRY_LATER"


class TooManyConnectionsError(StoreBusyError):
    """The role already has `max_connections` clients."""

    code = "TOO_MANY_CONNECTIONS"


class SlowConsumerError(MqprocError):
    """The client did not read its answers and was disconnected."""

    code = "SLOW_CONSUMER"


class DiskFullError(MqprocError):
    """No disk space for the messages; nothing was stored; reads continue."""

    code = "DISK_FULL"
    retryable = True


class StoreReadOnlyError(MqprocError):
    """A sync failed, so the durable position is unknown; requires `mqproc store repair`."""

    code = "STORE_READ_ONLY"


class FlushFailedError(MqprocError):
    """The messages were written but the sync failed: their outcome is unknown."""

    code = "FLUSH_FAILED"


class PermissionDeniedError(MqprocError):
    """Access denied: another user's process, a topic without permission, a disabled group."""

    code = "PERMISSION_DENIED"


class InternalError(MqprocError):
    """A bug in mqproc; the role's log has the traceback."""

    code = "INTERNAL"


class TransactionNotFoundError(MqprocError):
    """No half message has this id, or it has been deleted by retention."""

    code = "TRANSACTION_NOT_FOUND"
    exit_code = 5


class TransactionEndedError(MqprocError):
    """The transaction is committed, rolled back or given up already."""

    code = "TRANSACTION_ENDED"


class TransactionOverdueError(MqprocError):
    """Past the transaction timeout only the answer to a check decides."""

    code = "ILLEGAL_OPERATION"


def _tree(root: type[MqprocError]) -> list[type[MqprocError]]:
    return [root, *(found for child in root.__subclasses__() for found in _tree(child))]


ERROR_BY_CODE: dict[str, type[MqprocError]] = {error.code: error for error in _tree(MqprocError)}


def error_from_wire(code: str, message: str, details: dict[str, int]) -> MqprocError:
    """The error for a server's code. `details`: integers of the class, such as `position`."""
    kind = ERROR_BY_CODE.get(code)
    if kind is None:
        return InternalError(f"{code}: {message}")
    return kind(message, **details)


def error_details(error: MqprocError) -> dict[str, int]:
    """The integers that `error_from_wire` needs to restore the error."""
    names = ("hint_ms", "position", "min_offset", "max_offset")
    return {name: value for name in names if (value := getattr(error, name, 0))}
