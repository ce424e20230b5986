"""Writing of partitioned tensors to files, each rank its own block."""
