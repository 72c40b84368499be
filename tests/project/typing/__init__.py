"""Programs of users, as type checkers see them: read by mypy and pyright, never run.

A comment ``type: ignore[...]`` stands where both must find a mistake. Where one finds
none, it says that the comment is unused.
"""
