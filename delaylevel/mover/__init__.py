"""Hand-off of ready messages: the forwarder, and the code that drives it in one process."""
