"""What is done with experiments: clusters simulated and broken, claims measured, costs projected, runs reported.

The rooms here stand on `ddp_core` and are never imported by it.
"""
