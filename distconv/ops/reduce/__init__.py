"""Reductions over dimensions, partitioned or not: sums, norms, variances and extrema."""
