"""Generating samples on many ranks: the command line, and files that all of them write."""
