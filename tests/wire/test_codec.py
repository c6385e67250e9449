"""Errors of options that cannot be encoded or decoded name the field and its value."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from mqproc.errors import BadRequestError
from mqproc.wire.frames import decode_request
from mqproc.wire.operations import CreateTopicRequest, Operation, PullRequest, encoded


def pull(**fields: Any) -> PullRequest:
    return PullRequest(**{"topic": "orders", "queue_id": 0, "offset": 0} | fields)


def test_options_accept_numpy_numbers_and_text() -> None:
    given = pull(topic=np.str_("orders"), queue_id=np.int64(3), offset=np.uint8(7), rocketmq_limits=np.bool_(True))
    assert decode_request(Operation.PULL, encoded(given)) == pull(queue_id=3, offset=7, rocketmq_limits=True)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("topic", "\ud800", "topic = .*ud800' cannot be sent"),
        ("offset", np.float64(1.5), r"offset = (np.float64\()?1.5\)? cannot be sent"),
        ("offset", object, "offset = <class 'object'> cannot be sent"),
        ("offset", 1 << 70, "offset = 1180591620717411303424 cannot be sent"),
        ("tags", ["a", object], "tags = .* cannot be sent"),
    ],
)
def test_options_that_cannot_be_encoded_are_refused(field: str, value: Any, message: str) -> None:
    with pytest.raises(BadRequestError, match=f"^{message}"):
        encoded(pull(**{field: value}))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"offset": "0"}, r"^options of PULL: offset = '0': Expected `int`, got `str`$"),
        ({"offset": 1.5}, r"^options of PULL: offset = 1.5: Expected `int`, got `float`$"),
        ({"topic": None}, r"^options of PULL: topic = None: Expected `str`, got `None`$"),
        ({"tags": ["a", 5]}, r"^options of PULL: tags = \['a', 5\]: Expected `str`, got `int`$"),
        ({"topic": 5, "offset": "x" * 100}, r"^options of PULL: topic = 5: Expected `str`, got `int`$"),
        ({"offset": "x" * 100}, r"^options of PULL: offset = 'x{63}…: Expected `int`, got `str`$"),
    ],
)
def test_options_of_wrong_type_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        decode_request(Operation.PULL, encoded(pull(**fields)))


def test_options_with_trailing_bytes_are_refused() -> None:
    whole = encoded(CreateTopicRequest("orders", "many"))  # type: ignore[arg-type]
    with pytest.raises(BadRequestError, match=r"^options of CREATE_TOPIC: queues: Expected `int`, got `str`$"):
        decode_request(Operation.CREATE_TOPIC, whole[:-1])
    with pytest.raises(BadRequestError, match=r"^options of CREATE_TOPIC: Expected `array`, got `int`$"):
        decode_request(Operation.CREATE_TOPIC, msgspec.msgpack.encode(5))
