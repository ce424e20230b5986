"""Estimate the parameters of a cosmology from the distribution of matter."""
