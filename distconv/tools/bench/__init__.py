"""A training step of a user's network taken apart: `python -m distconv bench`."""
