"""A whole module on a grid: its parameters, gradients and states."""
