"""What AMP did: the results of ops as they were, their statistics, and what follows from them."""
