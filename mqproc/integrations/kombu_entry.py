"""Name of the Celery transport, registered when kombu loads its entry points.

kombu loads entry points for serializers, but none for transports. The serializer is kombu's JSON under another name.
"""

from __future__ import annotations

from typing import Final

from kombu.transport import TRANSPORT_ALIASES
from kombu.utils.json import dumps, loads

TRANSPORT_ALIASES["mqproc"] = "mqproc.integrations.celery:Transport"
SERIALIZER: Final = (dumps, loads, "application/x-mqproc-json", "utf-8")
