"""The command line: one module for each group of commands. It prints; other rooms do the work."""
