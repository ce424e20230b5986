"""Example programs for distconv."""
