"""What query makes of half messages: the committed message, the copy of a check, what is given up, rows of a list.

Each bears the half message's place in `preparedTransactionOffset`, by which a start finds it.
"""

from __future__ import annotations

from mqproc.errors import BadRequestError
from mqproc.layout import properties, record
from mqproc.message import StoredMessage
from mqproc.names import CHECK_MAX_TIME_TOPIC, HALF_TOPIC
from mqproc.roles.appender import NewMessage
from mqproc.roles.group_retries import copy_of
from mqproc.store.delays.made_from import mark_of
from mqproc.store.transactions.halves import QUEUE, Half
from mqproc.wire.transaction_operations import TransactionRow


def committed(message: StoredMessage) -> NewMessage:
    """The message of a half message, for its own topic. Raises BadRequestError when that does not say where it goes."""
    pairs = message.properties
    topic, queue_id = pairs.get(properties.REAL_TOPIC, ""), pairs.get(properties.REAL_QID, "")
    if not topic or not queue_id.isdecimal():
        raise BadRequestError(f"the half message {message.message_id} does not say where it goes")
    new = copy_of(message, topic, int(queue_id), {}, message.reconsume_times)
    flags = new.sys_flag & ~record.SYS_FLAG_TRANSACTION_MASK | record.SYS_FLAG_COMMIT
    return _made_from(new._replace(sys_flag=flags), message)


def is_committed(message: StoredMessage) -> bool:
    """Whether a message was made by a commit."""
    return message.sys_flag & record.SYS_FLAG_TRANSACTION_MASK == record.SYS_FLAG_COMMIT


def checked(message: StoredMessage, checks: int) -> NewMessage:
    """The half message once more, checked so many times."""
    times = {properties.TRANSACTION_CHECK_TIMES: str(checks)} if checks else {}
    return _made_from(copy_of(message, HALF_TOPIC, QUEUE, times, message.reconsume_times), message)


def given_up(message: StoredMessage) -> NewMessage:
    """The half message where RocketMQ keeps those that nobody would decide."""
    return _made_from(copy_of(message, CHECK_MAX_TIME_TOPIC, QUEUE, {}, message.reconsume_times), message)


def _made_from(new: NewMessage, message: StoredMessage) -> NewMessage:
    return new._replace(prepared_transaction_offset=mark_of(message.physical_offset))


def row(half: Half) -> TransactionRow:
    """An open transaction as it is listed."""
    names = half.transaction_id, half.message_id, half.group, half.topic
    return *names, half.physical_offset, half.size, half.born_ms, half.stored_ms, half.checks, half.check_ms
