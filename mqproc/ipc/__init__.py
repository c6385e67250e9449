"""What processes share: words in mapped files, rows of segments, the store's lock, bells, clocks."""
