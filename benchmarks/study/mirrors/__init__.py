"""Data sets out of packages on other indexes than Python's."""
