"""A run: from the request, through preparation and training, to the run directory with its record and its lock.

Starting processes belongs to `launch`.
"""
