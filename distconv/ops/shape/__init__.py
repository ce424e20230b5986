"""Reshapes, parts of tensors, and reordering of elements."""
