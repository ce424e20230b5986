"""Reductions over dimensions that may be cut."""
