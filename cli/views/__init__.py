"""Printed forms: tables, live lines, the log, and the rows of level topics."""
