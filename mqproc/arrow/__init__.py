"""Messages as Arrow: columns, batches made by compiled kernels, lazy streams."""
