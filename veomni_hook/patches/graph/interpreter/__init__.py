"""Execute a function symbolically: names have nodes as values, and what it returns is its graph.

From the bottom up: `state` (names, calls and effects so far), `memory` (who shares a tensor, and changes in
place), `inline` (functions of the same file), `calls`, `expressions`, `assignment`, `loops`, `statements`.
Each file imports only from those before it. `Trace` carries what is needed further down: `evaluate`, `run`.
"""
