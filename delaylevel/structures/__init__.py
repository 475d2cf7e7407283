"""Data structures of the final window: arrays and files, independent of Pulsar."""
