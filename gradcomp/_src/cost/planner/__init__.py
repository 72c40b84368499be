"""The planner: compares codecs and exchanges for a model and its links."""
