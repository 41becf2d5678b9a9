"""The host side of a cluster: start its nodes, follow them, judge every one of them, and leave nothing behind.

`python -m ddp_lab.cluster up --nodes 2 --nproc 2 --experiment digits` runs containers where a Docker Engine answers
and local processes otherwise, through the same launcher. Either backend (containers.py, local.py) has the verbs of
cluster.py.
"""
