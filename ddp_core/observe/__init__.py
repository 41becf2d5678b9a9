"""What is noticed while training goes on: metrics, heartbeats, lost peers, the ledger of samples, usage, traces.

Nothing here changes what is computed.
"""
