"""Filters over message properties in RocketMQ's SQL92, compiled for a kernel (README.md)."""
