"""Halos around a rank's own block, and how an operator makes its outputs of both."""
