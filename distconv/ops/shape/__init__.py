"""Changes of shape, parts of tensors, and what rearranges their elements."""
