"""The properties strings of many messages at once: values by name as columns, and the strings without some names.

    data     uint8[m]      all strings, one behind the other: name 0x01 value 0x02 …
    offsets  int64[n + 1]  where each message's begins

The last of a name counts. All but a text's own bytes is done by numpy, whatever the number of messages.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mqproc.layout.properties import NAME_END, PAIR_END

DIGITS_MAX: Final = 18
_NAME_END: Final = ord(NAME_END)
_PAIR_END: Final = ord(PAIR_END)
_ZERO: Final = np.uint8(ord("0"))
_POWERS: Final = 10 ** np.arange(DIGITS_MAX - 1, -1, -1, dtype=np.int64)

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pairs:
    """Pairs of one name, ascending: whose they are, where each begins, where its value begins and ends. int64[k]."""

    messages: Places
    begins: Places
    values: Places
    ends: Places

    def last_of_each(self) -> Pairs:
        """One pair of each message."""
        if len(self.messages) < 2:
            return self
        last = np.append(self.messages[1:] != self.messages[:-1], True)
        return self if last.all() else self.chosen(last)

    def chosen(self, which: NDArray[np.bool_]) -> Pairs:
        """Some of them."""
        return Pairs(self.messages[which], self.begins[which], self.values[which], self.ends[which])


class PropertyColumns:
    """Properties of `len` messages."""

    def __init__(self, offsets: NDArray[np.integer], data: Bytes) -> None:
        self.offsets: Places = offsets.astype(np.int64)
        self.data = data[: int(offsets[-1])]
        self._found: dict[str, Pairs] = {}

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @functools.cached_property
    def _name_ends(self) -> Places:
        ends = np.flatnonzero(self.data == _NAME_END)
        return ends if not len(ends) or ends[0] else ends[1:]

    @functools.cached_property
    def _last_letters(self) -> Bytes:
        return self.data[self._name_ends - 1]

    @functools.cached_property
    def _pair_ends(self) -> Places:
        """One more behind the end: a last pair may lack its own."""
        return np.append(np.flatnonzero(self.data == _PAIR_END), len(self.data))

    def pairs(self, name: str) -> Pairs:
        """All pairs of that name."""
        found = self._found.get(name)
        if found is None:
            found = self._found[name] = self._look_for(name.encode())
        return found

    def numbers(self, name: str) -> Places:
        """A property's values as numbers, int64[n]; −1 where there is none, or no number of up to 18 digits."""
        pairs = self.pairs(name).last_of_each()
        numbers = np.full(len(self), -1, np.int64)
        sizes = pairs.ends - pairs.values
        # Most often all are of one size.
        for size in set(sizes.tolist()):
            if 1 <= size <= DIGITS_MAX:
                some = pairs.chosen(sizes == size)
                digits = self._texts_at(some.values, size).view(np.uint8).reshape(-1, size)
                digits = digits - _ZERO  # What is below "0" is above 9 then.
                values = digits @ _POWERS[-size:]
                if digits.max() > 9:
                    values[(digits > 9).any(axis=1)] = -1
                numbers[some.messages] = values
        return numbers

    def texts(self, name: str) -> list[bytes]:
        """A property's values, b"" where there is none."""
        texts = [b""] * len(self)
        pairs = self.pairs(name).last_of_each()
        if len(pairs.messages):
            sizes = pairs.ends - pairs.values
            size = int(sizes[0])
            if size and len(pairs.messages) == len(self) and (sizes == size).all():
                # Most often all are one text.
                found = self._texts_at(pairs.values, size)
                text: bytes = found[0].tobytes()
                if (found.view(np.uint8).reshape(-1, size) == np.frombuffer(text, np.uint8)).all():
                    return [text] * len(self)
            data = self.data.tobytes()
            for message, begin, end in zip(
                pairs.messages.tolist(), pairs.values.tolist(), pairs.ends.tolist(), strict=True
            ):
                texts[message] = data[begin:end]
        return texts

    def strings(self) -> list[bytes]:
        """Each message's whole string."""
        data, offsets = self.data.tobytes(), self.offsets.tolist()
        return [data[begin:end] for begin, end in itertools.pairwise(offsets)]

    def without(self, *names: str) -> PropertyColumns:
        """The same without the pairs of some names."""
        gone = [self.pairs(name) for name in names]
        begins = np.concatenate([pairs.begins for pairs in gone])
        if not len(begins):
            return self
        messages = np.concatenate([pairs.messages for pairs in gone])
        # The pair's own end goes too; the last one of a message may have none.
        stops = np.minimum(np.concatenate([pairs.ends for pairs in gone]) + 1, self.offsets[messages + 1])
        steps = np.zeros(len(self.data) + 1, np.int8)
        steps[begins] += 1
        steps[stops] -= 1
        kept = self.data[np.cumsum(steps[:-1], dtype=np.int8) == 0]
        taken = np.bincount(messages + 1, stops - begins, len(self) + 1).astype(np.int64)
        return PropertyColumns(self.offsets - np.cumsum(taken), kept)

    def _texts_at(self, places: Places, size: int) -> NDArray[np.void]:
        """As many bytes of the data from each of these places on, void[k]."""
        every = np.ndarray((len(self.data) - size + 1,), f"V{size}", self.data, strides=(1,))
        found: NDArray[np.void] = every[places]
        return found

    def _look_for(self, name: bytes) -> Pairs:
        """By a name's last letter, then by its first, then by all of them."""
        size = len(name)
        begins = self._name_ends[self._last_letters == name[-1]] - size
        if len(begins) and begins[0] < 0:
            begins = begins[begins >= 0]
        begins = begins[self.data[begins] == name[0]]
        if not len(begins):
            return _NO_PAIRS
        begins = begins[self._texts_at(begins, size).view(f"S{size}") == name]
        ends = begins + size
        messages = np.searchsorted(self.offsets, ends, "right") - 1
        firsts = self.offsets[messages]
        # A name begins the string, or follows the end of the pair before.
        whole = (begins == firsts) | ((begins > firsts) & (self.data[begins - 1] == _PAIR_END))
        if not whole.all():
            ends, begins, messages = ends[whole], begins[whole], messages[whole]
        stops = np.minimum(self._pair_ends[np.searchsorted(self._pair_ends, ends)], self.offsets[messages + 1])
        return Pairs(messages, begins, ends + 1, stops)


_NO_PLACES: Final = np.empty(0, np.int64)
_NO_PAIRS: Final = Pairs(_NO_PLACES, _NO_PLACES, _NO_PLACES, _NO_PLACES)
