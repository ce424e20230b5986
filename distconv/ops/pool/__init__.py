"""Pooling on cut planes."""
