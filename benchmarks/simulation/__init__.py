"""A simulation of traffic through levels: cohorts of messages on a virtual clock, without a broker.

A cohort stands for the messages that were published in one interval and are due in one interval.
:mod:`.traffic` divides a load into cohorts, :mod:`.movement` moves them by the rules of the
product, and :mod:`.year` measures storage, loads, peaks and the recovery after an outage.
"""
