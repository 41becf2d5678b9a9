"""What one worker process does, in order: it meets the others, builds the parts, trains, and keeps the record.

A worker begins with a request that is complete. How a request is made is the business of `cli`, how workers are started
that of `launch`.
"""
