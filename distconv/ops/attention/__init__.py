"""Attention of partitioned queries, keys and values; partitioned keys need not be gathered."""
