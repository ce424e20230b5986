"""The commands of `python -m distconv`, related ones in one module."""
