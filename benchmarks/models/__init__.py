"""The papers' models of cost, and the data of the planner."""
