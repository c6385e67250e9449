"""The engine as plain objects over StoreIO and shared words: no process, no socket, no clock of its own."""
