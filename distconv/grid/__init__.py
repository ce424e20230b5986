"""The ranks of a job as a grid with named axes, and what each of them computes on."""
