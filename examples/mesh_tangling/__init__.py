"""Predict which zones of a Lagrangian mesh will tangle, from the state of the simulation."""
