"""The writer role: appends to the CommitLog and manages topics."""
