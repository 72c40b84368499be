"""Tests, in folders that mirror the library."""
