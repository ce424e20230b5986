"""Tests of examples/fractals."""
