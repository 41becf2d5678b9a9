"""How a claim measures: ranks, timing, whole training runs, stepping by hand, bytes on the wire."""
