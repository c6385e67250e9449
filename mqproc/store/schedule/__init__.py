"""Delayed messages: delay levels and the timer, as in RocketMQ. See README.md."""
