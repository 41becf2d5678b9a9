"""A run's directory: what happened in it, what it was made of, and whether it may be continued.

What is here writes and reads files of a run; nothing here trains.
"""
