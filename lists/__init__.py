"""The cast-policy lists of clamp, read with importlib.resources by clamp.casting.policy_table."""
