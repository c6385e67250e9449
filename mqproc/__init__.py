"""RocketMQ's storage engine as a group of Python processes on one machine."""
