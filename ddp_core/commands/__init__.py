"""What `ddp` does beside training: verify, compare, doctor, and the estimate of memory. One module each."""
