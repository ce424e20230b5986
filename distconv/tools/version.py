"""The version of this library, which setup.cfg reads without importing it."""

__version__ = "0.1.0"
