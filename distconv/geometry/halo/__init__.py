"""Halos around a rank's own block, and the computation of outputs from both."""
