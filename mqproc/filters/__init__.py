"""Filters over a message's properties: RocketMQ's SQL92, compiled once and evaluated without Python (README.md)."""
