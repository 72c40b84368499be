"""The table of codecs, exchanges, feedback, places and workers, and its laws."""
