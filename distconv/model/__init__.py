"""A whole module on a grid: its parameters, its gradients and its states."""
