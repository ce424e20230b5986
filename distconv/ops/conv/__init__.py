"""Convolution and transposed convolution of tensors partitioned in space and channels."""
