"""`mqproc top`: a group live on a terminal: dispatch lag, rates, roles, topics, consumer groups, errors."""
