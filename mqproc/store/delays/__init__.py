"""Messages that wait for their time: what the keeper knows of them on disk. See README.md."""
