"""The memory of a step of training: less of it (setting ``memory``), and what it will be.

What is in force is in `parts`. A checkpointed layer keeps its inputs and what its attention computed
(`checkpoint`, `attention`); both may go to the host meanwhile (`offload`, `host`). MLPs and experts may run
on some positions at a time (`tiles`), attention for some heads (`heads`). `prediction` says what a step takes
before it runs: its own code on `fakes`, which `tracker` follows; `lengths` and `remedies` ask it what fits,
and `budget` chooses by it.
"""
