"""The commands of `python -m distconv`; related commands share a module."""
