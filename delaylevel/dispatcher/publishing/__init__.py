"""Publication of due messages: what a target takes, the sending, and the outcomes."""
