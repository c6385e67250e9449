"""Twenty minutes of mixed load with a role killed every five seconds."""
