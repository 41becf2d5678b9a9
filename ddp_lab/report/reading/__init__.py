"""Files become records: runs, claims and drills as they lie on disk. Nothing here draws or formats."""
