"""The transformation: its options, feedback, state and measures."""
