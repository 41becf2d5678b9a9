"""Other people's models, optimizers and schedules, each trained on every layout: `make test-foreign`.

`fleet` lists the cases; each is a setting of one of the files in `experiments`. `driver` trains one case on every
layout, some cases at a time; `record` keeps the outcomes, and `page` makes docs/evidence/other-peoples-code.md
of them.
"""
