"""Access to storage: StoreIO, injected faults, SIGBUS; clocks."""
