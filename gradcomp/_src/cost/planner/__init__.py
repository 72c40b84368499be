"""The planner: chooses a codec and an exchange for a model and a link, or neither."""
