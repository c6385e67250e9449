"""`mqproc doctor`: what is wrong with a machine, its settings and a store, why it matters, and what mends it."""
