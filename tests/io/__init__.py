"""Tests of mqproc.io."""
