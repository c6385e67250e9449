"""All errors that mqproc raises: one tree, each with its code on the wire."""

from __future__ import annotations

from typing import ClassVar


class MqprocError(Exception):
    """Base class with the code on the wire, the command's exit code, and when to retry.

    `retryable`: the request was certainly not executed, and may succeed after `hint_ms`.
    """

    code: ClassVar[str] = "ERROR"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1

    def __init_subclass__(cls, **values: str | bool | int) -> None:
        """Set `code`, `retryable` and `exit_code`; those not given are inherited."""
        for name, value in values.items():
            setattr(cls, name, value)

    def __init__(self, message: str, *, hint_ms: int = 0) -> None:
        super().__init__(message)
        self.hint_ms = hint_ms


class ConfigurationError(MqprocError, code="CONFIGURATION", exit_code=8):
    """Invalid value of an option; the text names option, value and allowed range."""


class StoreLockedError(MqprocError, code="STORE_LOCKED", exit_code=7):
    """Another process, of mqproc or RocketMQ, holds the store's lock."""


class CorruptStoreError(MqprocError, code="CORRUPT", exit_code=6):
    """Invalid bytes on disk; the text names file, offset, expected and found."""


class OtherVersionError(CorruptStoreError, code="OTHER_VERSION", exit_code=3):
    """Written by another version of mqproc; nothing is damaged."""


class StoreAccessError(MqprocError, code="STORE_ACCESS", exit_code=3):
    """The store's path is not a folder, belongs to another user, or is not writable."""


class StoreNotFoundError(StoreAccessError, code="STORE_NOT_FOUND", exit_code=5):
    """No folder, or no store, at the given path."""


class StartError(MqprocError, code="START_FAILED", exit_code=3):
    """The group, or one of its roles, could not start."""


class NotRunningError(MqprocError, code="NOT_RUNNING", exit_code=9):
    """No group runs on this store."""


class RequestTimeoutError(MqprocError, code="TIMEOUT", exit_code=4):
    """No answer in time to a request without side effects."""


class SendOutcomeUnknownError(MqprocError, code="OUTCOME_UNKNOWN", exit_code=4):
    """The connection was lost after a send: the messages may or may not be stored."""


class ProtocolError(MqprocError, code="BAD_FRAME"):
    """The peer sent an invalid frame."""


class FrameTooLargeError(ProtocolError, code="FRAME_TOO_LARGE"):
    """A frame is larger than `max_frame_bytes`."""


class UnsupportedVersionError(ProtocolError, code="UNSUPPORTED_VERSION"):
    """The peer uses another protocol version."""


class UnknownCommandError(ProtocolError, code="UNKNOWN_COMMAND"):
    """Unknown operation number; the connection stays open."""


class BadRequestError(MqprocError, code="BAD_REQUEST", exit_code=2):
    """Invalid values in a request; nothing was done."""


class BadTopicError(BadRequestError, code="BAD_TOPIC"):
    """A topic's name is empty, too long, or has a byte outside RocketMQ's set."""


class TopicReservedError(BadRequestError, code="TOPIC_RESERVED"):
    """Clients may not send to this topic, or not create or delete it."""


class BadMessageError(BadRequestError, code="BAD_MESSAGE"):
    """A message's columns contradict each other."""


class BadPropertyError(BadRequestError, code="BAD_PROPERTY"):
    """A property's name or value has a separator byte, is empty, or is reserved."""


class MessageTooLargeError(BadRequestError, code="MESSAGE_TOO_LARGE"):
    """A body exceeds `max_message_size`, or the record does not fit into a segment."""


class PropertiesTooLargeError(BadRequestError, code="PROPERTIES_TOO_LARGE"):
    """Properties take more than 32,767 bytes."""


class NoSuchQueueError(BadRequestError, code="NO_SUCH_QUEUE"):
    """A queue id is negative or not below the topic's number of queues."""


class BadLevelError(BadRequestError, code="BAD_LEVEL"):
    """A delay level is out of range."""


class BadTimeError(BadRequestError, code="BAD_TIME"):
    """A delivery time or delay is invalid, too far ahead, or its timer slot is full."""


class FilterSyntaxError(BadRequestError, code="BAD_FILTER"):
    """Invalid filter; `position` counts characters from 0, the text from 1."""

    def __init__(self, message: str, *, position: int = 0, hint_ms: int = 0) -> None:
        super().__init__(message, hint_ms=hint_ms)
        self.position = position


class TopicNotFoundError(MqprocError, code="TOPIC_NOT_FOUND", exit_code=5):
    """No such topic."""


class TopicExistsError(MqprocError, code="TOPIC_EXISTS"):
    """The topic exists with other settings."""


class MessageNotFoundError(MqprocError, code="MESSAGE_NOT_FOUND", exit_code=5):
    """No message has this id, or it has been deleted by retention."""


class TooManyQueuesError(MqprocError, code="TOO_MANY_QUEUES"):
    """The store already has `max_queues` queues."""


class OffsetOutOfRangeError(MqprocError, code="OFFSET_OUT_OF_RANGE"):
    """A queue offset is outside of [`min_offset`, `max_offset`)."""

    def __init__(self, message: str, *, min_offset: int = 0, max_offset: int = 0, hint_ms: int = 0) -> None:
        super().__init__(message, hint_ms=hint_ms)
        self.min_offset = min_offset
        self.max_offset = max_offset


class OffsetOverflowError(OffsetOutOfRangeError, code="OFFSET_OVERFLOW"):
    """A committed offset would exceed the queue's end; nothing was changed."""


class StaleOffsetError(OffsetOutOfRangeError, code="STALE_OFFSET"):
    """A committed offset would decrease, which only a reset may do; nothing was changed."""


class GroupNotFoundError(MqprocError, code="GROUP_NOT_FOUND", exit_code=5):
    """No such consumer group."""


class GroupInUseError(MqprocError, code="GROUP_IN_USE"):
    """The consumer group has members; nothing was changed."""


class FilterMismatchError(BadRequestError, code="FILTER_MISMATCH"):
    """A live consumer of the group has another filter in the same topic."""


class NotAMemberError(MqprocError, code="NOT_A_MEMBER"):
    """The consumer is no longer a member of its group, or no longer has the queue.

    It was silent for too long, or a rebalance assigned the queue to another member.
    """


class StoreBusyError(MqprocError, code="STORE_BUSY", retryable=True):
    """The store refuses work for now; nothing was stored; retry after `hint_ms`."""


class RetryLaterError(StoreBusyError, code="RETRY_LATER"):
    """The role is restarting; nothing was changed; retry after `hint_ms`."""


class TooManyConnectionsError(StoreBusyError, code="TOO_MANY_CONNECTIONS"):
    """The role already has `max_connections` clients."""


class SlowConsumerError(MqprocError, code="SLOW_CONSUMER"):
    """The client did not read its answers and was disconnected."""


class DiskFullError(MqprocError, code="DISK_FULL", retryable=True):
    """No disk space for the messages; nothing was stored; reads continue."""


class StoreReadOnlyError(MqprocError, code="STORE_READ_ONLY"):
    """A sync failed, so the durable position is unknown; requires `mqproc store repair`."""


class FlushFailedError(MqprocError, code="FLUSH_FAILED"):
    """The messages were written but the sync failed: their outcome is unknown."""


class PermissionDeniedError(MqprocError, code="PERMISSION_DENIED"):
    """Access denied: another user's process, a topic without permission, a disabled group."""


class InternalError(MqprocError, code="INTERNAL"):
    """A bug in mqproc; the role's log has the traceback."""


class TransactionNotFoundError(MqprocError, code="TRANSACTION_NOT_FOUND", exit_code=5):
    """No half message has this id, or it has been deleted by retention."""


class TransactionEndedError(MqprocError, code="TRANSACTION_ENDED"):
    """The transaction is committed, rolled back or given up already."""


class TransactionOverdueError(MqprocError, code="ILLEGAL_OPERATION"):
    """Past the transaction timeout only the answer to a check decides."""


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
