"""RocketMQ's config files, damaged: they are read, or the error says that they cannot be."""

from __future__ import annotations

from pathlib import Path
from random import Random

from mqproc.errors import CorruptStoreError
from mqproc.io.store_io import StoreIO
from mqproc.store import rocketmq_json
from tests.fuzz.mutations import damage

WHOLE = [
    text.encode()
    for text in (
        '{"offsetTable":{"orders@billing":{0:17,1:4,-2:9},"%RETRY%billing@billing":{0:3}},"dataVersion":'
        '{"counter":5,"stateVersion":0,"timestamp":1700000000000}}',
        '{"offsetTable":{1:10,2:0,18:7}}',
        '{"topicConfigTable":{"orders":{"attributes":{"+message.type":"NORMAL"},"order":false,"perm":6,"readQueueNums":8,'
        '"topicFilterType":"SINGLE_TAG","topicName":"orders","topicSysFlag":0,"writeQueueNums":8}},"dataVersion":{}}',
        '{"subscriptionGroupTable":{"a \\"quoted\\" group":{"groupName":"g","retryMaxTimes":16,"retryQueueNums":1}}}',
        '{"text":"{0:1,2:3}","list":[{0:[1,2,{3:4}]},null,true,-1.5e3],"\\u00e4":"\\\\"}',
    )
]


class JsonFiles:
    """Damaged files in a folder, one after the other."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "consumerOffset.json"
        for data in WHOLE:
            self._path.write_bytes(data)
            assert rocketmq_json.load(StoreIO(), self._path)[0], "whole files are read, so damage is what is looked at"

    def run(self, seed: int) -> None:
        """One damaged file. Raises what no reader expects."""
        random = Random(seed)
        data = random.choice((b"[", b'{"a":')) * 100_000 if seed % 1000 == 999 else random.choice(WHOLE)
        self.look(damage(random, data, WHOLE))

    def look(self, data: bytes) -> None:
        """Read a file with these bytes."""
        self._path.write_bytes(data)
        try:
            rocketmq_json.load(StoreIO(), self._path)
        except CorruptStoreError:
            return

    def close(self) -> str:
        """Nothing is left to be checked."""
        return ""
