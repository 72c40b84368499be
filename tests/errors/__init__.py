"""Tests of what is refused: tables of bad calls and what their errors say."""
