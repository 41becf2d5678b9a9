"""This process among the others: the launcher's variables, the process group, requests to stop, ending children.

What is sent within a training step belongs to `reduction` and `trainers`. What others' loops may use is in the
`__all__` of `process_group` and `world`, which are not imported here, because the first of them loads torch.
"""
