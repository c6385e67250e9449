"""The frame protocol without I/O: cutting, building, matching answers, and output queues.

    socket ──bytes──▶ FrameReader ──Frame──▶ server: Request        client: ClientProtocol ──▶ Answer
    socket ◀─buffers── encode_frame, encode_refusal ◀── answer      request ──▶ ClientProtocol ──▶ buffers

Servers and both clients use these very functions. Sizes are checked before anything is allocated for them.
"""

from __future__ import annotations

import itertools
import operator
import socket
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from mqproc.errors import (
    FrameTooLargeError,
    MqprocError,
    ProtocolError,
    UnsupportedVersionError,
    error_details,
    error_from_wire,
)
from mqproc.layout.frame import (
    ANSWER,
    CONNECTION_ID,
    GREETING,
    HEADER,
    HEADER_SIZE,
    MAGIC,
    OPERATION_MASK,
    REFUSAL,
    VERSION,
    encode_header,
)
from mqproc.wire.operations import REQUESTS, UNDECODABLE, ErrorAnswer, FrameOptions, Operation, not_decodable

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from _typeshed import ReadableBuffer

# sendmsg takes at most IOV_MAX (1,024) pieces; fewer are enough to fill a socket's buffer.
PIECES_MAX = 256
# Up to this many bytes, more pieces than that are joined.
JOINED_BYTES_MAX = 1 << 20

_nbytes = operator.attrgetter("nbytes")


def size_of(pieces: Sequence[ReadableBuffer]) -> int:
    """Total bytes of all pieces."""
    return sum(map(_nbytes, map(_view, pieces)))


class OutputQueue:
    """Bytes that a non-blocking socket has not taken yet, oldest first.

    `queued_bytes` and `sent_bytes` count from the beginning: the peer cannot have a whole frame that ended at
    `queued_bytes` N while `sent_bytes` is below N.
    """

    __slots__ = ("_pieces", "queued_bytes", "sent_bytes")

    def __init__(self) -> None:
        self._pieces: deque[memoryview] = deque()
        self.queued_bytes = 0
        self.sent_bytes = 0

    @property
    def waiting_bytes(self) -> int:
        return self.queued_bytes - self.sent_bytes

    def write(self, sock: socket.socket, pieces: Sequence[ReadableBuffer], *, owned: bool = True) -> bool:
        """Send as much as the socket takes and keep the rest; return True when nothing is left.

        The caller must not change the pieces until they are sent; with `owned` False the rest is copied instead. Raises
        OSError when the peer is gone.
        """
        if self._pieces or len(pieces) > PIECES_MAX:
            return self._write_queued(sock, pieces, owned)
        # Usually the socket takes everything, and no views are made.
        single = pieces[0] if len(pieces) == 1 else None
        size = len(single) if type(single) is bytes else size_of(pieces)
        self.queued_bytes += size
        try:
            sent = sock.sendmsg(pieces) if single is None else sock.send(single)
        except BlockingIOError:
            sent = 0
        if sent == size:
            self.sent_bytes += size
            return True
        count = self._keep(pieces)
        self._took(sent)
        if not owned:
            self._copy_last(count)
        return False

    def _write_queued(self, sock: socket.socket, pieces: Sequence[ReadableBuffer], owned: bool) -> bool:
        """Write pieces after the queued pieces, or a large number of pieces."""
        if len(pieces) > PIECES_MAX and size_of(pieces) <= JOINED_BYTES_MAX:
            return self.write(sock, (b"".join(pieces),))
        count = self.queue(pieces)
        if self.send(sock):
            return True
        if not owned:
            self._copy_last(count)
        return False

    def queue(self, pieces: Sequence[ReadableBuffer]) -> int:
        """Queue pieces for the next `send`; return their number. Their bytes must not change."""
        self.queued_bytes += size_of(pieces)
        return self._keep(pieces)

    def _keep(self, pieces: Sequence[ReadableBuffer]) -> int:
        views = [view.cast("B") for view in map(_view, pieces) if view.nbytes]
        self._pieces.extend(views)
        return len(views)

    def _copy_last(self, count: int) -> None:
        """Replace the newest pieces that are still queued by copies."""
        pieces = self._pieces
        for index in range(-min(count, len(pieces)), 0):
            pieces[index] = memoryview(bytes(pieces[index]))

    def send(self, sock: socket.socket) -> bool:
        """Send as much as the socket takes; return True when nothing is left. Raises OSError."""
        while self._pieces:
            try:
                sent = sock.sendmsg(itertools.islice(self._pieces, PIECES_MAX))
            except BlockingIOError:
                return False
            self._took(sent)
        return True

    def _took(self, count: int) -> None:
        """Remove the oldest `count` bytes."""
        pieces = self._pieces
        self.sent_bytes += count
        while count and pieces:
            first = len(pieces[0])
            if first > count:
                pieces[0] = pieces[0][count:]
                break
            count -= first
            pieces.popleft()

    def clear(self) -> None:
        """Discard unsent bytes."""
        self._pieces.clear()
        self.queued_bytes = self.sent_bytes


# Frames up to this size are joined into one piece: cheaper than passing several to the kernel.
JOINED_FRAME_BYTES_MAX = 16 << 10
# A reader starts with the first size, and releases a buffer above the second once its frame is done.
FIRST_BUFFER_BYTES = 64 << 10
KEPT_BUFFER_BYTES = 16 << 20

_GREETING_SIZE = GREETING.size
_unpack_header = HEADER.unpack_from
_pack_header = HEADER.pack
_view: Callable[[ReadableBuffer], memoryview] = memoryview
encode_options: Final = msgspec.msgpack.Encoder().encode
"""The encoder's own method, without a Python call in between: a client waits for the answer."""
_decode_error_answer = msgspec.msgpack.Decoder(ErrorAnswer).decode
_REQUEST_DECODERS = {int(operation): msgspec.msgpack.Decoder(kind) for operation, kind in REQUESTS.items()}
NO_OPTIONS = encode_options([])


class Frame(msgspec.Struct, eq=False):
    """One frame. Its views are valid until the reader gets more bytes."""

    operation: int  # with ANSWER and REFUSAL
    request_id: int
    options: memoryview
    payload: memoryview


def empty_buffer(size: int) -> memoryview:
    """A writable buffer whose pages take memory only once bytes arrive in them."""
    return np.empty(size, np.uint8).data


def check_greeting(view: memoryview, at: int) -> None:
    """Check that the bytes at `at`, at least 6, begin a frame of this version; else raise."""
    magic, version = GREETING.unpack_from(view, at)
    if magic != MAGIC:
        raise UnsupportedVersionError(f"frame begins with 0x{magic:08X}, not 0x{MAGIC:08X}; speaks 1..{VERSION}")
    if version != VERSION:
        raise UnsupportedVersionError(f"frame of version {version}; speaks 1..{VERSION}")


class FrameReader:
    """Cuts a stream of bytes into frames without copying them.

    Get room from `writable`, fill it, report the size to `received`, then take all frames. Frames
    already taken become invalid with the next `writable`.
    """

    __slots__ = ("_bound", "_buffer", "_end", "_frame_bytes_max", "_hint", "_needed", "_start", "has_more")

    def __init__(self, frame_bytes_max: int, limit: str = "") -> None:
        """`limit`: name of the bound in errors when the caller configured it."""
        self._frame_bytes_max = frame_bytes_max
        self._bound, self._hint = f"{frame_bytes_max:,}", ""
        if limit:
            self._bound = f"{limit} = {self._bound}"
            self._hint = "; ask for fewer messages at a time, or give it a larger one"
        self._buffer: memoryview | None = None
        self._start = 0
        self._end = 0
        self._needed = 0  # size of the frame at _start, 0 while its header is incomplete
        self.has_more = False
        """Whether bytes followed the last frame."""

    @property
    def waiting_bytes(self) -> int:
        """Bytes received that belong to no frame yet."""
        return self._end - self._start

    def adopt(self, buffer: memoryview, start: int, end: int) -> None:
        """Continue in `buffer`, which has received bytes [start, end)."""
        self._buffer, self._start, self._end, self._needed = buffer, start, end, 0

    def release(self) -> memoryview | None:
        """Give the buffer away; pending bytes are discarded."""
        buffer, self._buffer = self._buffer, None
        self._start = self._end = self._needed = 0
        return buffer

    def move_to(self, buffer: memoryview) -> None:
        """Continue in another buffer, large enough for the pending bytes."""
        waiting = self.rest()
        buffer[: len(waiting)] = waiting
        self._buffer, self._start, self._end = buffer, 0, len(waiting)

    def rest(self) -> memoryview:
        """The pending bytes."""
        return memoryview(b"") if self._buffer is None else self._buffer[self._start : self._end]

    def place(self) -> tuple[memoryview, int, int]:
        """(buffer, begin, end) of the pending bytes; call it only when there are some."""
        assert self._buffer is not None
        return self._buffer, self._start, self._end

    def take_to(self, end: int) -> None:
        """Skip whole frames up to `end` of the buffer, which the caller has taken."""
        self._start, self._needed = end, 0

    def writable(self) -> memoryview:
        """Room for more bytes: at least for the rest of the partial frame."""
        buffer = self._buffer
        if buffer is None:
            buffer = self._buffer = empty_buffer(FIRST_BUFFER_BYTES)
        if self._start == self._end:
            self._start = self._end = 0
            if len(buffer) > KEPT_BUFFER_BYTES:
                buffer = self._buffer = empty_buffer(FIRST_BUFFER_BYTES)
            return buffer
        waiting = self.waiting_bytes
        begun = self._needed > waiting
        needed = self._needed if begun else waiting + HEADER_SIZE
        if self._start + needed > len(buffer):
            # Unread whole frames may fill the buffer: double it as often as needed.
            buffer = self._make_room(buffer, needed if begun else max(needed, 2 * waiting))
        return buffer[self._end :]

    def _make_room(self, buffer: memoryview, needed: int) -> memoryview:
        """Move the pending bytes to the front, of a larger buffer if the frame does not fit."""
        target = buffer if needed <= len(buffer) else empty_buffer(max(needed, FIRST_BUFFER_BYTES))
        self.move_to(target)
        return target

    def fill(self, sock: socket.socket) -> int:
        """Read from a socket into `writable`; return the byte count, 0 at its end. Raises OSError."""
        buffer = self._buffer
        if buffer is not None and self._start == self._end and len(buffer) <= KEPT_BUFFER_BYTES:
            self._start = self._end = 0
            count = self._end = sock.recv_into(buffer)
        else:
            count = sock.recv_into(self.writable())
            self._end += count
        return count

    def received(self, size: int) -> None:
        """Account for `size` bytes put into the last `writable`."""
        self._end += size

    def feed(self, data: ReadableBuffer) -> None:
        """Copy `data` of any length in."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            room = self.writable()
            count = min(len(room), view.nbytes)
            room[:count] = view[:count]
            self.received(count)
            view = view[count:]

    def next_frame(self) -> Frame | None:
        """Return the next whole frame, or None. After a ProtocolError the stream is unusable."""
        buffer, start, end = self._buffer, self._start, self._end
        waiting = end - start
        if buffer is None or waiting < HEADER_SIZE:
            if buffer is not None and waiting >= _GREETING_SIZE:
                check_greeting(buffer, start)
            return None
        if waiting < self._needed:
            return None
        magic, version, operation, request_id, options_size, zero, payload_size = _unpack_header(buffer, start)
        options_start = start + HEADER_SIZE
        payload_start = options_start + options_size
        end_of_frame = payload_start + payload_size
        if magic != MAGIC or version != VERSION or zero or end_of_frame - start > self._frame_bytes_max:
            check_greeting(buffer, start)
            if (size := end_of_frame - start) > self._frame_bytes_max:
                raise FrameTooLargeError(f"frame of {size:,} bytes exceeds {self._bound}{self._hint}")
            raise ProtocolError(f"reserved header word is 0x{zero:X}, not 0")
        if end_of_frame > end:
            self._needed = end_of_frame - start
            return None
        self._start = end_of_frame
        self._needed = 0
        self.has_more = end_of_frame < end
        return Frame(operation, request_id, buffer[options_start:payload_start], buffer[payload_start:end_of_frame])

    def bad_frame(self, error: ProtocolError) -> tuple[int, int]:
        """Operation and id of the frame that `next_frame` rejected; 0 and CONNECTION_ID if unknown."""
        rest = self.rest()
        if len(rest) < HEADER_SIZE or isinstance(error, UnsupportedVersionError):
            return 0, CONNECTION_ID
        _, _, operation, request_id, _, _, _ = _unpack_header(rest)
        return operation & OPERATION_MASK, request_id


def encode_frame(
    operation: int, request_id: int, options: bytes, payload: Sequence[ReadableBuffer] = ()
) -> list[ReadableBuffer]:
    """Encode a frame as buffers to send in order: one if it is small, else without a copy."""
    # Usually there is at most one piece, and no sizes are added up.
    if len(payload) == 1:
        piece = payload[0]
        size = len(piece) if type(piece) is bytes else _view(piece).nbytes
    else:
        size = size_of(payload) if payload else 0
    header = _pack_header(MAGIC, VERSION, operation, request_id, len(options), 0, size)
    if size <= JOINED_FRAME_BYTES_MAX:
        return [b"".join((header, options, *payload))]
    return [header + options, *payload]


def encode_refusal(operation: int, request_id: int, error: MqprocError) -> bytes:
    """Encode the whole frame that refuses a request."""
    # A file name in the text may not be UTF-8.
    text = str(error).encode(errors="backslashreplace").decode()
    options = encode_options(ErrorAnswer(error.code, text, error_details(error)))
    return encode_header((operation & OPERATION_MASK) | ANSWER | REFUSAL, request_id, len(options), 0) + options


def decode_request(operation: int, options: ReadableBuffer) -> FrameOptions:
    """Decode a request's options to the type in `REQUESTS`. Raises BadRequestError."""
    try:
        return _REQUEST_DECODERS[operation].decode(options)
    except UNDECODABLE as error:
        raise not_decodable(Operation(operation).name, REQUESTS[Operation(operation)], options, error) from None


def decode_refusal(options: ReadableBuffer) -> MqprocError:
    """Decode the error that a refusal carries."""
    try:
        answer = _decode_error_answer(options)
        return error_from_wire(answer.code, answer.message, answer.details)
    except (*UNDECODABLE, TypeError) as error:
        return ProtocolError(f"unreadable refusal: {error}")


class AnswerFrame(msgspec.Struct, eq=False):
    """The answer to a request: options and payload, or the error that refused it."""

    request_id: int
    options: memoryview
    payload: memoryview
    error: MqprocError | None


class ClientProtocol:
    """A client's side of a connection: numbers requests and matches answers to them."""

    __slots__ = ("_last_id", "_operations", "reader")

    def __init__(self, frame_bytes_max: int) -> None:
        self.reader = FrameReader(frame_bytes_max, "this client's max_frame_bytes")
        self._last_id = CONNECTION_ID
        self._operations: dict[int, int] = {}

    @property
    def waiting(self) -> int:
        """Number of unanswered requests."""
        return len(self._operations)

    def request(
        self, operation: int, options: bytes, payload: Sequence[ReadableBuffer] = (), *, oneway: bool = False
    ) -> tuple[int, list[ReadableBuffer]]:
        """Number a request; return its id and the buffers to send. Oneway requests get no answer."""
        request_id = self._last_id = self._last_id + 1
        if not oneway:
            self._operations[request_id] = operation
        return request_id, encode_frame(operation, request_id, options, payload)

    def forget(self, request_id: int) -> None:
        """Drop the answer to this request when it arrives."""
        self._operations.pop(request_id, None)

    def next_answer(self) -> AnswerFrame | None:
        """Return the next whole answer, or None.

        Raises the error that a server sends before it closes, or ProtocolError; the connection is unusable then.
        """
        while (frame := self.reader.next_frame()) is not None:
            word, request_id = frame.operation, frame.request_id
            operation = self._operations.pop(request_id, None)
            if operation is None:
                self._check_unexpected(word, request_id, frame.options)
                continue
            if word == operation | ANSWER:
                return AnswerFrame(request_id, frame.options, frame.payload, None)
            if word == operation | ANSWER | REFUSAL:
                return AnswerFrame(request_id, frame.options, frame.payload, decode_refusal(frame.options))
            raise ProtocolError(f"request {request_id} was operation {operation}, its answer is 0x{word:04X}")
        return None

    def _check_unexpected(self, word: int, request_id: int, options: memoryview) -> None:
        """Ignore late answers to forgotten requests; an answer to an unsent request is an error."""
        if request_id == CONNECTION_ID and word & REFUSAL:
            raise decode_refusal(options)
        if request_id == CONNECTION_ID or request_id > self._last_id:
            raise ProtocolError(f"answer 0x{word:04X} to request {request_id}, which was never sent")
