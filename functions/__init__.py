"""The mover as a Pulsar Function: deployment, status, and the code that runs on the worker."""
