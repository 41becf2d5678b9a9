"""What `ddp` does beside training: verify, compare, doctor and others. One module each."""
