"""What `veomni-hook bench` measures: every op beside its peers, in one run, against the physical limit.

`cases` finds the problems, in one file an op: sizes and sides. `timing` measures, `run` puts both together,
`record` says what came out.
"""
