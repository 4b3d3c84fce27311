"""An op, a policy and an engine, as docs/architecture.md says how to add them."""
