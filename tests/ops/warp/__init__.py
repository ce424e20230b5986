"""Tests of warps."""
