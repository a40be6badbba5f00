"""Shipped fakes behind the same contracts as the real parts: engine, sandbox, clock."""
