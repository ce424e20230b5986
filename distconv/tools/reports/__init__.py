"""Reports for a browser: what commands find, as pages that need nothing else."""
