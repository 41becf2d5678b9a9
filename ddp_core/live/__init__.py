"""Live recovery: where a rank or a node is lost, the others go on in these processes, and lose no finished step.

The way of a launch and of a worker is that of `ddp_core.launch` and `ddp_core.run`; here is what a live recovery does
otherwise. membership.py is its protocol, in pure functions. Only a launch that has a live recovery loads this room.
"""
