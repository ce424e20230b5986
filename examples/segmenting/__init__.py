"""Segmenting volumes: what its examples share of losses and scores."""
