"""The queue: what is committed (`state`), its bytes (`log`, `chain`), the calls (`queue`, `records`, `session`, `queue_batches`),
and what opening does after a crash or a Java program (`recovery`, `java`).

It may import `batch`, `disk` and `formats`.
"""
