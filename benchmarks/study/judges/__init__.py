"""What decides claims."""
