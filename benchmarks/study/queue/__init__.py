"""The queue that trains in the background."""
