"""`ddp audit`: whether a run is what its record says, from a few segments of it that are trained again.

What belongs here: what draws from the kept states of a run, trains a segment again, and tells. Who notes these states:
`ddp_core.trainers` and `ddp_core.record`.
"""
