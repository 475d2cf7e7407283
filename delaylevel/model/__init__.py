"""The definition of a level topic and the next hop of a message: pure values and rules."""
