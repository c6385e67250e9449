"""Roles of the store's process group: bounded steps over StoreIO, control words and a clock."""
