"""Which function runs in which precision, where AMP is on, and what a policy does to a call's arguments."""
