"""Data sets."""

from pathlib import Path

FOLDER = Path(__file__).resolve().parents[3] / "datasets"  # where they are prepared
