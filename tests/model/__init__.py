"""Random programs of what consumers do and suffer, against what must hold all along."""
