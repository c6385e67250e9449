"""Tests of mqproc.config."""
