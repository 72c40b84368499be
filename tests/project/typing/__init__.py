"""Programs of users: mypy and pyright must find what each ``type: ignore`` is for."""
