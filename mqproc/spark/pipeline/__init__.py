"""The worked example of a declarative pipeline, and what runs it: see README.md of `mqproc.spark`."""
