"""Programs that tests run as processes of several hosts."""
