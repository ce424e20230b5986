"""Looking at what a module does: explain, verify, bench, and the command line."""
