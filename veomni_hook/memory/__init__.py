"""Less memory for a step of training (setting ``memory``): checkpointed layers, inputs on the host, tiles.

What is in force is in `parts`. A checkpointed layer keeps its inputs and what its attention computed
(`checkpoint`, `attention`); both may go to the host meanwhile (`offload`, `host`). MLPs and experts may run
on some positions at a time (`tiles`).
"""
