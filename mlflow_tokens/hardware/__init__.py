"""The devices a run holds."""
