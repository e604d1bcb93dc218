"""The topic: its one writer and its readers, each with a log. `topic`, `topic_session` and `reader` have the calls,
`topic_recovery` opens a topic after a crash or a zbus server.

It may import `batch`, `disk` and `formats`, and nothing of `queue`.
"""
