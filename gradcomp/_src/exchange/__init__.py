"""Exchanges: layouts, messages and the schedules of collectives that send them."""
