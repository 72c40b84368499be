"""Times of exchanges between hosts on links of a limited rate."""
