"""Consumer groups in the store: committed offsets, POP checkpoints, settings. See README.md."""
