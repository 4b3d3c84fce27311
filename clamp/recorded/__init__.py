"""Functions of the user's that are recorded once and replayed."""
