"""Attention of partitioned queries to partitioned keys, without gathering the keys."""
