"""Cancellations: the decisions, the messages that they drop, and the published outcomes."""
