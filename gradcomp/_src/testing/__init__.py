"""The conformance kit: laws that every codec and transformation must obey."""
