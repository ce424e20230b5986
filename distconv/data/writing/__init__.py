"""Writing tensors that are cut over ranks, each rank its own box."""
