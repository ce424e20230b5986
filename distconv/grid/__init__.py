"""The ranks of a job as a grid with named axes, and their devices."""
