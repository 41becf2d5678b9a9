"""`ddp audit`: whether a run is what its chain says, from a few segments of it that are trained again.

What belongs here: what reads a chain, draws from it, trains a segment again, and tells. Who writes it: `ddp_core.run`
and `ddp_core.trainers`.
"""
