"""The same loads on systems that can delay messages: this project, Pulsar itself and its peers.

`loads.py` has the loads, `trial.py` runs one load on one system, and `measurement.py` compares what
arrived with what was sent. Each system is a module that implements the protocol in `system.py`;
its client is a program of its own, with the lines of `client.py` as its interface. `report.py`
keeps the results, `page.py` and `plots.py` show them in docs/comparison.md.
"""
