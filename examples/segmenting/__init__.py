"""Segmenting volumes: losses and scores that examples share."""
