"""What `veomni-hook bench` measures: every op beside its peers, in one run, against the physical limit.

`problems` has one file an op: sizes and sides. `timing` and `limits` measure, `run` puts both together,
`record` and `plot` say what came out.
"""
