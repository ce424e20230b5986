"""The version of distconv, which setup.cfg and the site read without importing distconv."""

__version__ = "0.2.0"
