"""Bad input of every kind, at the real socket and in real files: refused clearly, and nothing is lost."""
