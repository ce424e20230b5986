"""Bytes between ranks, and nothing else."""
