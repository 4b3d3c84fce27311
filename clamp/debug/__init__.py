"""What AMP did: each op's result observed, its statistics, and what follows from them."""
