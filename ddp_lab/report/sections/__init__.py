"""Sections: one module for each section of the page; each turns records into tables, plots and short facts.

What a section shows is decided here, how a chart looks in `charts`, how a section is set in the templates.
Nothing here reads a file, but the end of a run's log, or writes markup.
"""
