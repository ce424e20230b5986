"""Changes of shape, parts of tensors, and other orders of their elements."""
