"""Segment organs and lesions in tomographic volumes."""
