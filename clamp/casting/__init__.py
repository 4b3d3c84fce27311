"""The precision that each function runs in, where AMP is on, and what a policy does to a call's arguments."""
