"""A user's own training script, measured alternately without and with the hook: `veomni-hook compare`.

`bootstrap`, `start`, `observer`, `recorder`, `measures` and `kernels` run inside the script's processes, and
for `veomni-hook plan` the `planner`.
`turns` and `process` start these, `runs` reads what they wrote (`plan` names the files), `figures` and
`verdict` compute the results, `report` collects them, and `page` and `charts` draw them.
"""
