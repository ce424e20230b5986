"""Convolution and transposed convolution, on cut planes and cut channels."""
