"""Stores as tables on Spark: `spark.read.format("mqproc")`, and jobs over stores.

Needs the extra `spark`: `pip install 'mqproc[spark]'`.
"""

from mqproc.spark.batch_read import messages
from mqproc.spark.session import local_session, register

__all__ = ["local_session", "messages", "register"]
