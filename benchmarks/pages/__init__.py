"""The tables of the pages, and the pages of claims, which records make."""
