"""Reports of the bytes that a step sends: from a trace, and from compiled HLO."""
