"""This process among the others: the launcher's variables, the process group, requests to stop, ending children.

What is sent within a training step belongs to `reduction` and `trainers`.
"""
