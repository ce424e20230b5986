"""Compiled steps: traced once, messages included, and replayed without Python around the work."""
