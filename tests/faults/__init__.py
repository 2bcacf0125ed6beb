"""Faults as tests: real processes train against a real server, and things go wrong from a seed."""
