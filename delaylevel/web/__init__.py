"""The HTTP service of a process: metrics, probes, a status page, and live queries.

A room without knowledge of Pulsar or of level topics: the parts of a process that are served
implement `Reporter`, and the service only asks them.
"""
