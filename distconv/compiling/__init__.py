"""Compiled programs: kernels and messages are traced once, and replayed without the Python code."""
