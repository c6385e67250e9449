"""Streams of the queues of stores, exactly once through Spark's checkpoints."""
