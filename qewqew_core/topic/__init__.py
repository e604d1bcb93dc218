"""The topic: its one writer and its readers, with a log each. `topic`, `topic_session` and `reader` have the calls,
`topic_recovery` what opening does after a crash or a zbus server.

It may import `batch`, `disk` and `formats`, and nothing of `queue`.
"""
