"""Reading: run directories, claims and drills become records, in whatever state their files are.

`runs` reads run directories, `claims` reads claims and drills, and `families` compares the runs of one experiment.
A file that cannot be read becomes a record that says why. Nothing here draws, or decides what the page shows.
"""
