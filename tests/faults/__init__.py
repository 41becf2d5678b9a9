"""The fault matrix: each fault happens to real processes; checks what a run says, leaves behind and resumes from."""
