"""The fault matrix: every fault is produced with real processes, and what a run says, leaves and resumes is checked."""
