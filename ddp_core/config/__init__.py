"""What may be asked for: experiment, layout, the cut of a batch among ranks, and options, as frozen checked records.

Nothing here imports torch or starts anything, so that `ddp --help` and `ddp list` answer at once.
"""
