"""Consumer groups: membership, queue assignment, offsets and retries."""
