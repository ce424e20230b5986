"""Reports for a browser: results of commands as self-contained pages."""
