"""What is observed during training: metrics, heartbeats, lost peers, the ledger of samples, usage, traces.

Nothing here changes what is computed.
"""
