"""What optimizers and transformations around codecs do, in NumPy."""
