"""Commands of `python -m distconv`, a file each: its options, and the function that runs it."""
