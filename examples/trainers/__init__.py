"""Trainers of other projects, each made to send 4 bits an element."""
