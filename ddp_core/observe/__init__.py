"""What is observed during training: metrics, heartbeats, lost peers, usage, traces.

Nothing here changes what is computed.
"""
