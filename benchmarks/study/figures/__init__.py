"""The pictures of a report."""
