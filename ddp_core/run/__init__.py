"""One experiment on one layout becomes a run directory: request, preparation, the run itself, its record and its lock.

How processes come to be is the business of `launch`.
"""
