"""Records become pictures. One module per subject; how a chart looks is decided in one place."""
