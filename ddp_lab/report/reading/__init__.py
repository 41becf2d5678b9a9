"""Reading: run directories, claims and drills become records, in whatever state their files are.

`runs` and `claims` read one kind of file each, `families` sets runs of one experiment side by side and judges them.
A file that cannot be read becomes a record that says why. Nothing here draws, or decides what the page shows.
"""
