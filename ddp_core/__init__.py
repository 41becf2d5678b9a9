"""Data-parallel training whose result does not depend on the layout.

Rooms from the ground up: `determinism`, `sampler`, `reduction`; `spec`, `distributed`, `data`, `checkpoint`; `model`,
`observe`; `trainers`; `run`; `launch`, `commands`; `cli`. A room imports from lower floors only.
"""
