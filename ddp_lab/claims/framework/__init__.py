"""What all claims share: the record of a claim, its setting, the statistics that judge, the suite and the page."""
