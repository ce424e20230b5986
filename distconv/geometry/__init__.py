"""Index arithmetic without torch and MPI: who holds what, and who needs what of whom."""
