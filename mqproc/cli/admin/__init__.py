"""Commands that run and observe a group, and that check a machine."""
