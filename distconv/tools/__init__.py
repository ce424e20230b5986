"""Tools to inspect a module on a grid: explain, verify, timelines, reports, the command line."""
