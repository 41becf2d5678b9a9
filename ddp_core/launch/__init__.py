"""How the worker processes of a run are made, watched, started again and ended, on one machine or many.

What a worker then does is the business of `run`.
"""
