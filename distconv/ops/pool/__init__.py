"""Pooling of partitioned planes and volumes."""
