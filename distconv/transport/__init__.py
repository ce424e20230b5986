"""Bytes between ranks, and nothing else: one small interface, and a file for each carrier."""
