"""The same loads on systems that can delay messages: this project, Pulsar itself and its peers.

`trial.py` has the loads, runs one on a system, and compares what arrived with what was sent. Each
system is a subclass of that in `system.py`; its client is a program with the lines of `client.py`.
"""
