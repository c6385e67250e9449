"""The roles: bounded steps over StoreIO, control words and a clock, and the loop that runs them."""
