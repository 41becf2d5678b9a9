"""What is done with experiments: clusters are simulated, broken on purpose, claims measured, costs projected, runs reported.

The rooms here stand on `ddp_core` and are never imported by it.
"""
