"""Data structures of the final window: in arrays and files, independent of Pulsar."""
