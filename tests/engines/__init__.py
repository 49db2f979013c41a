"""Tests of `rltop.engines` and of the CPU engine."""
