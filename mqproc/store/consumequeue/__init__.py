"""ConsumeQueues: files of units, their bounds, the queue table and flush."""
