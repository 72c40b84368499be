"""Trainers of other projects, each made to send 4 bits an element.

python -m examples.trainers.linen --steps 40
"""
