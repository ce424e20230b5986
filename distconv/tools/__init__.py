"""Looking at a module on a grid: explain, verify, timelines, reports, and the command line."""
