"""Charts: one module per subject (`learning`, `claims`), and in it one function per chart.

A chart function takes records that `reading` has made, draws them with plain matplotlib, and returns a `Plot` (`plot`).
Colours, dashes, fonts and sizes are decided in `style` alone. Nothing here reads a file or knows the page.
"""
