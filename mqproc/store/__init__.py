"""The storage engine as plain objects over StoreIO and shared words, without processes, sockets or a clock."""
