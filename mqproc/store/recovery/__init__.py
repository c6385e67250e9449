"""Recovery of a store after any kind of stop, and repair of a damaged store."""
