"""Transactions: what of them lies in the store."""
