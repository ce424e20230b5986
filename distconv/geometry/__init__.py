"""Index arithmetic without torch and MPI: the box that each rank holds, and the boxes it needs."""
