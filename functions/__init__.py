"""The Pulsar Function: a thin host of the router."""
