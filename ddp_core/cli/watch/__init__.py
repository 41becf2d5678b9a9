"""`ddp watch`: looks at run directories while they grow, and shows what it finds, live or in lines.

Nothing here writes into a run directory or needs torch. `run` is what is known of one run, `finding` which runs are
looked at, `lines` and `view` how they are shown, and `watch` the command.
"""
