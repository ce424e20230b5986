"""Index arithmetic without torch and MPI: the box of each rank, and the boxes it needs."""
