"""The version of this library, which setup.cfg and the site read without importing it."""

__version__ = "0.2.0"
