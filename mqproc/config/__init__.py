"""Options: the table, the parsing of their sources, RocketMQ's `broker.conf`."""
