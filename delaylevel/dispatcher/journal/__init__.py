"""The journal of a window partition: what was released, and what may have been."""
