"""Training on several processes and machines, with MPI."""
