"""Training on hosts that come and go."""
