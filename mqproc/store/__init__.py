"""The storage engine as plain objects over StoreIO and shared words."""
