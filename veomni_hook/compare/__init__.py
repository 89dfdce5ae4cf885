"""A user's own training script, measured without and with the hook by turns: `veomni-hook compare`.

Inside the script's processes run `bootstrap`, `observer`, `recorder`, `tokens`, `measures` and `kernels`.
`turns` and `process` start them, `runs` reads what they wrote (`plan` names the files), `figures` and
`verdict` compute, `report` puts it together, `page` and `charts` draw it.
"""
