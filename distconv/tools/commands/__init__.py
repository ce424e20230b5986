"""The commands of `python -m distconv`, a module for those that belong together."""
