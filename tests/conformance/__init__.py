"""The conformance table: what every netcl function must compute under AMP, and the tests that hold clamp to it."""
